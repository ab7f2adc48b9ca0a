"""Every method with every optimiser and with a schedule: the stacked executor equals the reference."""

import pytest
import torch
from helpers import RAGGED, assert_same, make_federation, make_task, method, methods, run_rounds
from sentences import user_error

import fedloom
from fedloom.core.optimizers import Optimizer, Schedule
from fedloom.engine.plan import Plan

PLAN = Plan("stacked", "eager", chunk=7)  # test_parity has traced steps
FALLING = Schedule("cosine", rounds=3, warmup=1)


def task_for(name, **settings):
    alg = method(name)
    least = alg.min_samples(make_task(RAGGED))
    data = make_federation([max(n, least) for n in RAGGED], server=20)
    return alg, make_task((), federation=data, lr=0.02, **settings)


@pytest.mark.parametrize("name", [name for name in methods() if name != "scaffold"])
def test_stacked_equals_reference_with_adamw_and_a_schedule(name):
    schedule = Schedule() if name in ("page", "dap-fl") else FALLING
    alg, task = task_for(name, optimizer=Optimizer("adamw", eps=1e-4), weight_decay=0.01, schedule=schedule)
    assert_same(alg, task, PLAN, 1e-8)


def test_scaffold_follows_a_schedule():
    """The control variates contain the learning rate of the round."""
    alg, task = task_for("scaffold", schedule=FALLING)
    assert_same(alg, task, PLAN, 1e-9)


def test_nesterovs_momentum():
    alg, task = task_for("ditto", optimizer=Optimizer(nesterov=True), momentum=0.9)
    assert_same(alg, task, PLAN, 1e-9)


def test_a_step_schedule_with_gamma_1_and_adam_change_what_they_should():
    """A schedule that does not fall is none; Adam is not SGD."""
    alg, plain = task_for("fedavg")
    _, flat = task_for("fedavg", schedule=Schedule("step", rounds=3, gamma=1.0))
    _, adam = task_for("fedavg", optimizer=Optimizer("adam"))
    (run, _), (same, _), (other, _) = (run_rounds(alg, task) for task in (plain, flat, adam))
    for name, v in run.server["w"].items():
        torch.testing.assert_close(v, same.server["w"][name], rtol=1e-12, atol=1e-13)
        assert not torch.allclose(v, other.server["w"][name], atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", [name for name in methods() if name not in ("scaffold", "page", "dap-fl")])
def test_captured_graphs_equal_the_reference_on_a_gpu(name):
    alg, task = task_for(name, device="cuda", optimizer=Optimizer("adam", eps=1e-4), schedule=FALLING)
    assert_same(alg, task, Plan("stacked", "captured", chunk=7), 1e-8)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("scaffold", {"optimizer": "adam"}, ("scaffold", "plain SGD", "optimizer=sgd")),
        ("page", {"lr_schedule": "cosine", "server_share": 0.2}, ("choose learning rates", "lr_schedule=constant")),
        ("fedavg", {"nesterov": True}, ("nesterov", "momentum=0.9")),
        ("fedavg", {"nesterov": True, "optimizer": "adam"}, ("nesterov", "optimizer=sgd")),
        ("fedavg", {"momentum": 0.9, "optimizer": "adam"}, ("momentum is for optimizer=sgd", "momentum=0")),
        ("fedavg", {"lr_warmup": 9, "rounds": 5}, ("lr_warmup=9", "5 rounds")),
        ("fedavg", {"optimizer": "adams"}, ("optimizer cannot be 'adams'", "adam")),
        ("fedavg", {"adam_betas": "0.9"}, ("adam_betas takes 2 numbers such as 0.7/0.1",)),
    ],
)
def test_what_does_not_fit_is_refused(name, settings, words):
    with user_error(*words):
        fedloom.run(name, clients=5, **{"rounds": 2, **settings})


def test_a_run_with_a_cosine_schedule_cannot_be_given_more_rounds(tmp_path):
    small = {"clients": 4, "plan": "per-client", "out": tmp_path / "run"}
    fedloom.run("fedavg", rounds=2, lr_schedule="cosine", **small)
    with user_error("cosine schedule", "depends on their number"):
        fedloom.run("fedavg", rounds=3, lr_schedule="cosine", resume=True, **small)


def test_adam_learns_and_runs_with_a_step_schedule_grow_byte_for_byte(tmp_path):
    small = {
        "clients": 4, "plan": "stacked-eager", "batch_size": 50, "optimizer": "adam", "lr": 0.01, "lr_warmup": 1,
        "lr_schedule": "step", "lr_step": 2, "lr_gamma": 0.5,
    }  # fmt: skip
    fedloom.run("fedavg-ft", rounds=2, out=tmp_path / "a", **small)
    grown = fedloom.run("fedavg-ft", rounds=4, out=tmp_path / "a", resume=True, **small)
    fedloom.run("fedavg-ft", rounds=4, out=tmp_path / "b", **small)
    assert grown.last()["pre_acc_mean"] > 60
    for name in ("rounds.parquet", "clients.parquet", "final/server.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
