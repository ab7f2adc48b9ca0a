"""What holds for all methods, or for many of them."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EAGER,
    RAGGED,
    SingleRun,
    client_state,
    logreg_task,
    make_federation,
    make_task,
    method,
    methods,
    run_rounds,
    running_statistics,
    tensor,
)
from oracles import assert_equal, assert_finite, assert_scores, client_samples, is_near

from fedloom.core.tree import leaves
from fedloom.studies.build import check


@pytest.mark.parametrize("name", [n for n in methods() if n not in ("fedavg", "local")])
def test_with_its_defaults_no_method_is_fedavg_or_local(name):
    """Models that every client would use, after two rounds: predictions of all views on all samples."""
    task = make_task(RAGGED, lr=0.1, data={"server": 20})

    def views(name):
        _, records = run_rounds(method(name), task, rounds=2, evaluate=True)
        scores = records[-1].scores
        return {view: found["test"] for view, found in scores.items()} | {"train": scores["pre"]["train"]}

    found = views(name)
    for other in ("fedavg", "local"):
        reference = views(other)
        common = found.keys() & reference.keys()
        assert not all(np.allclose(found[v], reference[v], rtol=1e-12, atol=1e-12) for v in common), other


@pytest.mark.parametrize("name", methods())
def test_global_random_generators_neither_matter_nor_move(name):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        alg, task = method(name), make_task((20, 33, 21, 27), dropout=0.2, data={"server": 20})
        run, _ = run_rounds(alg, task, rounds=2, evaluate=True)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        found.append((run.server, run.store.everyone()))
    assert_equal(*found)


@pytest.mark.parametrize("name", methods())
def test_a_client_that_is_not_sampled_keeps_its_state(name):
    alg = method(name)
    if not alg.partial:
        pytest.skip(f"{name} needs all clients in every round")
    task = make_task([max(n, alg.min_samples(make_task(RAGGED))) for n in RAGGED], data={"server": 20})
    run = SingleRun(alg, task, 0, plan=EAGER)
    run.advance(evaluate=False, cohort=np.array([0, 1, 2]))
    before = [v.clone() for v in leaves(run.store.everyone())]
    run.advance(evaluate=False, cohort=np.array([1, 4]))
    absent = [i for i in range(len(RAGGED)) if i not in (1, 4)]
    for old, new in zip(before, leaves(run.store.everyone()), strict=True):
        assert torch.equal(old[absent], new[absent])


@pytest.mark.parametrize("name", ["ditto", "fedphp", "fml"])
def test_a_client_that_never_trained_is_served_by_the_global_model(name):
    """The personal model is a copy of its own, so until it exists the global one serves."""
    task = make_task(RAGGED, norm=True)
    _, records = run_rounds(method(name), task, seed=0, cohorts=[(1, 4), (1, 7)], evaluate=True)
    scores, trained = records[-1].scores, [1, 4, 7]
    new = [i for i in range(len(RAGGED)) if i not in trained]
    for view in ("pre", "post"):
        np.testing.assert_allclose(scores[view]["test"][new], scores["global"]["test"][new])
        assert not np.allclose(scores[view]["test"][trained], scores["global"]["test"][trained])


def test_post_scores_stay_those_of_the_last_participation():
    run = SingleRun(method("fedavg"), make_task(RAGGED), 0, plan=EAGER)
    first = run.advance(cohort=np.array([0, 1])).scores["post"]["test"]
    second = run.advance(cohort=np.array([2, 3])).scores["post"]["test"]
    np.testing.assert_array_equal(first[:2], second[:2])


def test_scores_are_those_of_the_right_model():
    """PM_pre of FedPer, GM of FedAvg and PM_post of local training against a forward pass in plain PyTorch."""
    task = make_task((9, 14, 5))
    samples = client_samples(task, "test")
    run, records = run_rounds(method("fedper"), task, evaluate=True)
    models = [{**run.server["phi"], **client_state(run, "h", i)} for i in range(3)]
    assert_scores(records[-1].scores["pre"]["test"], models, samples)
    run, records = run_rounds(method("fedavg"), task, evaluate=True)
    assert_scores(records[-1].scores["global"]["test"], [run.server["w"]] * 3, samples)
    run, records = run_rounds(method("local"), task, evaluate=True)
    assert_scores(records[-1].scores["post"]["test"], [client_state(run, "theta", i) for i in range(3)], samples)


def test_running_statistics_stay_with_their_client_and_are_averaged_for_the_server_only():
    task = make_task((8, 20, 30), norm=True, data={"server": 10})
    run, records = run_rounds(method("fedavg"), task, rounds=2, evaluate=True)
    means = running_statistics(run, "w")["norm.running_mean"]
    assert not torch.allclose(means[0], means[1])
    expected = (tensor([8, 20, 30])[:, None] / 58 * means).sum(0)
    torch.testing.assert_close(run.stats["w"]["norm.running_mean"], expected)
    assert records[-1].server is not None
    assert set(run.server) == {"w"}
    assert not any("running" in k for k in run.server["w"])


def test_running_statistics_continue_from_one_participation_to_the_next():
    """With a vanishing learning rate the batch mean m never changes, so after k steps the running mean is
    (1 - 0.9^k) m; 3 rounds of 2 epochs with one batch each are 6 steps."""
    task = make_task((8, 9), norm=True, lr=1e-14, epochs=2)
    run, _ = run_rounds(method("fedavg"), task)
    w = task.init(run.key)
    for i, (x, _) in enumerate(client_samples(task, "train")):
        mean = F.linear(x, w["first.weight"], w["first.bias"]).mean(0)
        torch.testing.assert_close(running_statistics(run, "w", i)["norm.running_mean"], (1 - 0.9**6) * mean)


def test_momentum_starts_anew_in_every_round_for_the_second_model_too():
    """FML's and FedRoD's second model, and MOON's projection: a round of two steps is another than two of one."""
    for name, settings in (("fml", {}), ("fedrod", {}), ("moon", {"proj": 4})):
        task = make_task((9, 14), momentum=0.9, batch_size=14)
        once, _ = run_rounds(method(name, **settings), replace(task, epochs=2), rounds=1)
        twice, _ = run_rounds(method(name, **settings), task, rounds=2)
        assert not is_near(client_state(once), client_state(twice), 1e-6)


BODY, HEAD = 6 * 8 + 8, 8 * 4 + 4  # numbers in the small net, in float64
MODEL = (BODY + HEAD) * 8
PROTOTYPES = 4 * 8 * 8 + 4  # of four classes with 8 features, and for each class a byte that says whether there is one
TRAFFIC = [  # bytes that a client downloads and uploads in a round, if they are not one model each way
    ("local", {}, 0, 0),
    ("scaffold", {}, 2 * MODEL, 2 * MODEL),
    ("fedper", {}, BODY * 8, BODY * 8),
    ("fedrep", {}, BODY * 8, BODY * 8),
    ("fedrecon", {}, BODY * 8, BODY * 8),
    ("lg-fedavg", {}, HEAD * 8, HEAD * 8),
    ("hypcluster", {}, 2 * MODEL, MODEL + 8),  # the index of a model is an int64
    ("fedproto", {}, PROTOTYPES, PROTOTYPES),
    ("fedrod", {"personal_head": "hyper"}, *[MODEL + (4 * 32 + 32 + 32 * 36 + 36) * 8] * 2),
    ("moon", {"proj": 5}, *[MODEL + (8 * 8 + 8 + 8 * 5 + 5) * 8] * 2),
    ("per-fedavg", {"allow_small": True}, MODEL, MODEL),
    *[
        (name, {}, MODEL, MODEL)
        for name in (
            "fedavg", "fedavg-ft", "fedprox", "ditto", "page", "fedrod", "fedphp", "fedala", "fml", "moon", "fedsam",
            "feddyn", "pfedme", "mapper", "partialfed", "dap-fl", "pfedhn", "plgu-ghn",
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "down", "up"), TRAFFIC, ids=[",".join([name, *settings]) for name, settings, *_ in TRAFFIC]
)
def test_traffic_is_what_the_specification_lists(name, settings, down, up):
    """FedFomo, GPFL and pFedKT, whose traffic depends on rounds or variants, are in their own files."""
    _, records = run_rounds(method(name, **settings), make_task(RAGGED, data={"server": 20}), rounds=2)
    assert [(r.bytes_down, r.bytes_up) for r in records] == [(len(RAGGED) * down, len(RAGGED) * up)] * 2


@pytest.mark.parametrize(
    "name",
    [
        "hypcluster", "mapper", "partialfed", "fedfomo", "dap-fl", "fedsam", "feddyn", "fedrecon", "per-fedavg",
        "pfedme", "lg-fedavg",
    ],
)  # fmt: skip
def test_missing_classes_and_the_smallest_clients_do_no_harm(name):
    """Nobody has class 4, and only client 1 class 3; some clients have one sample. Everything stays finite."""
    data = make_federation(RAGGED)
    y = torch.where(data.y == 3, 0, data.y)
    y[data.splits["train"][1][:10]] = 3
    task = make_task((), federation=replace(data, y=y, classes=5), rounds=5)
    settings = {"allow_small": True} if name == "per-fedavg" else {}
    run, records = run_rounds(method(name, **settings), task, rounds=5, evaluate=True)
    assert_finite(run)
    for scores in records[-1].scores.values():
        assert np.isfinite(scores["test"]).all()


@pytest.mark.parametrize("name", ["mapper", "partialfed", "fedfomo", "dap-fl"])
def test_a_model_of_a_single_layer_can_be_trained(name):
    task = logreg_task(RAGGED, dim=6, classes=4)
    check(method(name), task)
    _, records = run_rounds(method(name), task, evaluate=True)
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()
