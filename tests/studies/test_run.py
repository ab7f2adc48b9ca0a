"""A run from Python: settings; models, data and methods of the user; and what is recorded."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import Crash, crash_after, make_federation, model_task
from sentences import user_error
from torch import nn

import fedloom
from fedloom.algorithms.fedavg import FedAvg
from fedloom.config.resolve import configure, describe
from fedloom.core.tree import size_bytes
from fedloom.metrics.scores import summarize
from fedloom.studies.build import make_task
from fedloom.studies.execute import execute, execute_group
from fedloom.studies.study import stackable_groups


def test_everything_public_is_importable():
    for name in fedloom.__all__:
        assert getattr(fedloom, name) is not None


def test_a_run_records_every_round_and_every_client():
    result = fedloom.run("fedrep", rounds=4, clients=6, eval_every=3, seed=2)
    assert [row["round"] for row in result.rounds] == [3, 4]  # every third, and always the last
    clients = result.clients.to_pylist()
    assert [(row["round"], row["client"]) for row in clients] == [(t, i) for t in (3, 4) for i in range(6)]
    assert [row["round"] for row in result.timings] == [1, 2, 3, 4]
    last = result.last()
    mine = [row["pre_acc"] for row in clients if row["round"] == 4]
    assert last["pre_acc_mean"] == pytest.approx(np.mean(mine))
    assert last["pre_acc_worst"] == min(mine)
    assert last["pre_train_loss"] > 0
    assert last["bytes_up"] == 6 * 4 * (64 * 64 + 64)  # the body of the MLP, from 6 clients, in float32
    assert result.plan["mode"] in ("stacked", "per-client")
    assert len(result.partition) == 16


def test_three_reports_are_the_rounds_that_they_say():
    result = fedloom.run("ditto", rounds=8, clients=6)
    validation = [(row["pre_val_acc_mean"], -row["pre_val_loss"]) for row in result.rounds]
    test = [row["pre_acc_mean"] for row in result.rounds]
    assert result.last()["round"] == 8
    assert result.best_on_validation()["round"] == validation.index(max(validation)) + 1
    assert result.best_on_test()["round"] == int(np.argmax(test)) + 1


def test_of_equal_validation_accuracies_the_lowest_loss_decides():
    result = fedloom.run("local", rounds=4, clients=5)
    for row, acc, loss in zip(result.rounds, (90, 95, 95, 95), (0.1, 0.4, 0.2, float("nan")), strict=True):
        row |= {"pre_val_acc_mean": acc, "pre_val_loss": loss}
    assert result.best_on_validation()["round"] == 3


def test_the_convergence_round_is_a_round_not_a_row():
    result = fedloom.run("local", rounds=6, clients=5, eval_every=3)
    assert result.convergence_round() in (3, 6)


def test_settings_reach_whoever_has_them():
    config = configure(
        "ditto", values={"lam": "0.5", "beta": 0.3, "width": 32, "lr": "0.2", "algorithm.personal_epochs": 2}
    )
    assert (config.algorithm.lam, config.algorithm.personal_epochs) == (0.5, 2)
    assert (config.partition.beta, config.model.width, config.settings.lr) == (0.3, 32, 0.2)
    described = describe(config)
    assert described["algorithm"] == {"name": "ditto", "lam": 0.5, "personal_epochs": 2}
    assert described["lr"] == 0.2


def test_a_setting_that_two_have_must_be_named_in_full():
    with user_error("partition.beta", "dataset.beta"):
        configure("fedavg", "synthetic", "dirichlet_class", values={"beta": 1})
    config = configure("fedavg", "synthetic", "dirichlet_class", values={"partition.beta": 2})
    assert (config.partition.beta, config.dataset.beta) == (2.0, 1.0)


def test_given_settings_override_the_defaults_of_the_data_set():
    assert configure("fedavg", "fmnist").settings.lr == 0.005
    assert configure("fedavg", "fmnist", values={"lr": 0.1}).settings.lr == 0.1


class CustomNet(nn.Module):
    def __init__(self, outputs=10):
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.1))
        self.classifier = nn.Linear(20, outputs)

    def forward(self, x):
        return self.classifier(self.trunk(x))


def test_any_module_with_a_named_head_is_a_model():
    result = fedloom.run("fedrep", model=CustomNet(), head="classifier", rounds=20, clients=5)
    assert set(result.store["h"]) == {"classifier.weight", "classifier.bias"}
    assert result.last()["pre_acc_mean"] > 60


def test_a_function_that_builds_a_model_gives_every_seed_its_own_start():
    task = make_task(configure("fedavg", model=CustomNet, head="classifier"))
    again = make_task(configure("fedavg", model=CustomNet, head="classifier"))
    assert torch.equal(task.init(0)["classifier.weight"], again.init(0)["classifier.weight"])
    assert not torch.equal(task.init(0)["classifier.weight"], task.init(1)["classifier.weight"])


def test_a_module_is_where_everybody_starts():
    module = CustomNet()
    task = make_task(configure("fedavg", model=module, head="classifier"))
    for seed in (0, 1):
        assert torch.equal(task.init(seed)["classifier.weight"], module.classifier.weight)


def test_a_model_with_too_few_outputs_is_refused():
    with user_error("7 outputs", "10 classes"):
        fedloom.run("fedavg", model=CustomNet(7), head="classifier")


def test_data_may_be_given_as_a_federation():
    data = make_federation((20, 30, 40), dtype=torch.float32)
    result = fedloom.run("fedper", data, model="mlp", rounds=5)
    assert len(result.clients) == 5 * 3


def test_a_method_of_the_user_is_one_class():
    @dataclass(frozen=True)
    class Half(FedAvg):
        """FedAvg whose server moves to a share of the average."""

        name = "test-half"
        share: float = fedloom.setting(0.5, "of the average", low=0, high=1)

        def aggregate(self, task, server, up, info, t, key):
            new = super().aggregate(task, server, up, info, t, key)
            return {"w": {k: (1 - self.share) * server["w"][k] + self.share * new["w"][k] for k in new["w"]}}

    by_name = fedloom.run("test-half", rounds=2, clients=5, share=1.0, plan="stacked")
    by_class = fedloom.run(Half(share=1.0), rounds=2, clients=5, plan="stacked")
    plain = fedloom.run("fedavg", rounds=2, clients=5, plan="stacked")
    for k, v in plain.server["w"].items():
        torch.testing.assert_close(by_name.server["w"][k], v)
        torch.testing.assert_close(by_class.server["w"][k], v)


@pytest.mark.parametrize("variant", ["page", "fedprox"])
def test_synthetic_data_gives_the_server_its_share(variant):
    result = fedloom.run("fedavg", "synthetic", clients=8, rounds=2, variant=variant)
    assert 0 <= result.last()["acc_global"] <= 100


def test_a_client_without_validation_samples_does_not_count_there():
    scores = np.array([[1.0, 0.5, 2.0], [0.0, 0.0, 0.0]])
    assert summarize(scores)["acc_mean"] == 50.0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_precision_is_that_of_all_tensors(dtype):
    result = fedloom.run("scaffold", rounds=1, clients=4, dtype=dtype)
    assert {v.dtype for v in result.server["w"].values()} == {getattr(torch, dtype)}


SMALL = {
    "clients": 4, "per_client": 40, "width": 8, "rounds": 5, "plan": "stacked-eager", "checkpoint_every": 1,
    "dtype": "float64",
}  # fmt: skip


def test_a_run_with_a_newer_checkpoint_waits_for_the_rest_of_its_group(tmp_path):
    """Two seeds crash in their second round; one is resumed by itself, and crashes in its fifth; then both are resumed
    as a group."""
    configs = [configure("ditto", "synthetic", model="mlp", values={**SMALL, "seed": seed}) for seed in (1, 2)]
    folders = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(Crash):
        execute_group(configs, out=folders, on_round=crash_after(4))
    with pytest.raises(Crash):
        execute(configs[1], out=folders[1], resume=True, on_round=crash_after(5))
    assert sorted(p.name for p in folders[1].glob("checkpoints/*"))[0] == "round-00000003.safetensors"
    seen = []
    found = execute_group(configs, out=folders, resume=True, on_round=lambda *progress: seen.append(progress[:2]))
    assert seen == [(1 + 3, 10), (2 + 3, 10), (3 + 3, 10), (4 + 4, 10), (10, 10)]
    for config, folder, result in zip(configs, folders, found, strict=True):
        single = execute(config)
        assert [row["round"] for row in result.rounds] == [1, 2, 3, 4, 5]
        for mine, whole in zip(result.rounds, single.rounds, strict=True):
            assert mine == pytest.approx(whole, rel=1e-9, nan_ok=True)
        assert fedloom.load(folder).last() == result.last()


def test_runs_that_differ_in_seeds_and_plain_numbers_are_stackable():
    settings = [{}, {"seed": 1}, {"lr": 0.3}, {"lam": 0.7, "momentum": 0.5}, {"clip": 1.0}, {"personal_epochs": 2}]
    settings += [{"batch_size": 5}, {"clip": 2.0}, {"partition_seed": 4}]
    configs = [configure("ditto", values=values) for values in settings]
    assert stackable_groups(configs) == [[0, 1, 2, 3], [4, 7], [5], [6], [8]]
    models = [nn.Sequential(nn.Flatten(), nn.Linear(64, 10)) for _ in range(2)]
    configs = [configure("fedavg", model=model, head="1", values={"seed": seed}) for model in models for seed in (0, 1)]
    assert stackable_groups(configs) == [[0, 1], [2, 3]]


def test_a_group_whose_state_does_not_fit_memory_is_split(monkeypatch):
    configs = [
        configure("local", "synthetic", model="mlp", values={**SMALL, "rounds": 2, "seed": seed}) for seed in range(3)
    ]
    whole = execute_group(configs)
    state = 2 * size_bytes(whole[0].store)  # of the last and the best round
    monkeypatch.setattr("fedloom.studies.execute.available_memory", lambda device: 2 * 2 * state)
    seen = []
    found = execute_group(configs, on_round=lambda *progress: seen.append(progress[:2]))
    assert seen == [(0, 6), (2, 6), (4, 6), (4, 6), (5, 6), (6, 6)]  # two runs at once, then the third
    assert [result.plan["runs"] for result in found] == [2, 2, 1]
    for mine, expected in zip(found, whole, strict=True):
        assert mine.last() == pytest.approx(expected.last(), rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("plan", ["stacked-eager", "per-client"])
def test_bf16_rounds_inside_the_model_and_nowhere_else(plan):
    """Eight bits of a product's factors: the change of the weights is that of float32 up to some percent."""
    values = {"rounds": 1, "clients": 4, "model": "cnn8", "plan": plan}
    before = fedloom.run("fedavg", lr=1e-12, **values).server["w"]
    exact, rounded = (
        fedloom.run("fedavg", lr=0.01, dtype=dtype, **values).server["w"] for dtype in ("float32", "bf16")
    )
    for name, w in before.items():
        assert rounded[name].dtype == torch.float32
        assert not torch.equal(rounded[name], exact[name])
        assert (rounded[name] - exact[name]).norm() < 0.1 * (exact[name] - w).norm(), name


@pytest.mark.parametrize(
    ("model", "shape", "more"), [("resnet18_bn", (1, 8, 8), {}), ("lstm_shakes", (6,), {"vocab": 9})]
)
def test_bf16_leaves_statistics_and_recurrent_layers_in_float32(model, shape, more):
    tasks = [model_task(model, shape, dtype=torch.float32, half=half, **more) for half in (False, True)]
    exact, rounded = (
        task.network.apply(task.init(0), task.network.buffers, task.data.x[:20], train=True) for task in tasks
    )
    assert rounded.logits.dtype == torch.float32
    assert 0 < (rounded.logits - exact.logits).norm() < 0.1 * exact.logits.norm()
    for name, value in exact.buffers.items():
        assert rounded.buffers[name].dtype == torch.float32
        torch.testing.assert_close(rounded.buffers[name], value, rtol=0.1, atol=0.05)
    if model == "lstm_shakes":  # nothing but the head is rounded
        assert torch.equal(rounded.features, exact.features)


def test_float32_means_float32_on_a_gpu_and_others_keep_their_choice():
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    seen = []

    def on_round(done, total, row):
        seen.append([place.allow_tf32 for place in places])

    before = [place.allow_tf32 for place in places]
    for dtype in ("float32", "bf16"):
        fedloom.run("local", rounds=1, clients=3, dtype=dtype, on_round=on_round)
    assert seen == [[False, False]] * 2 + [[True, True]] * 2
    assert [place.allow_tf32 for place in places] == before


def test_tf32_needs_a_gpu():
    with user_error("dtype=tf32 is a format of NVIDIA GPUs", "use dtype=float32"):
        fedloom.run("local", rounds=1, clients=3, dtype="tf32", device="cpu")
