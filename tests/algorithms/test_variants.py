"""Methods with settings other than their defaults: stacked clients give what one client after another gives, and
every known position of a sequence counts as a sample."""

import numpy as np
import pytest
import torch
from helpers import (
    EAGER,
    PER_CLIENT,
    RAGGED,
    SingleRun,
    assert_same,
    client_info,
    client_state,
    make_batch,
    make_task,
    method,
    run_and_evaluate,
    tensor,
    token_task,
)
from oracles import LEARNING_AGENTS, assert_finite

from fedloom.core.tree import leaves
from fedloom.engine.plan import Plan

EXTRA_LOSSES = [  # losses or statistics of classes besides the task's loss
    ("fedrod", {}),
    ("fedrod", {"personal_head": "hyper", "hidden": 7}),
    ("fedphp", {"lam": 0.4}),
    ("fedphp", {"lam": 0.4, "transfer": "kd"}),
    ("fedproto", {"lam": 1.0}),
    ("fedala", {"p": 2, "s": 60.0, "start_epochs": 11}),
    ("fedala", {"eta_A": 3.0, "start_epochs": 12}),
    ("fml", {"a": 0.3, "b": 0.8}),
    ("moon", {"mu": 3.0}),
    ("moon", {"mu": 3.0, "tau": 0.2, "proj": 5}),
]
OTHERS = [
    ("hypcluster", {"Kc": 3}),
    ("mapper", {"lambdas": (0.0, 0.6, 0.9)}),
    ("partialfed", {"warmup": 0.0, "policy_epochs": 2, "policy_lr": 0.3}),
    ("partialfed", {"warmup": 0.0, "policy_share": 0.3}),
    ("partialfed", {"mode": "fix"}),
    ("fedfomo", {"M": 2, "eps": 1.0, "eps_decay": 0.0}),
    ("fedfomo", {"M": 0}),
    ("dap-fl", {**LEARNING_AGENTS, "replay": 4}),
    ("dap-fl", {**LEARNING_AGENTS, "compat": True, "decode": "clip", "lr_max": 0.6, "local_clip": None}),
]


def variant_id(value):
    return value if isinstance(value, str) else ",".join(value) or "default"


@pytest.mark.parametrize(("name", "settings"), [*EXTRA_LOSSES, *OTHERS], ids=variant_id)
def test_a_variant_gives_the_same_stacked_and_client_by_client(name, settings):
    """Clients of one to sixty samples, with BatchNorm and dropout, some of them absent in some rounds; all of a cohort
    at once, and traced in chunks that do not divide the cohort."""
    task = make_task(
        RAGGED, norm=True, dropout=0.2, momentum=0.5, clip=1.0, epochs=2, lr=0.02, participation=0.7, rounds=5
    )
    alg = method(name, **settings)
    reference = run_and_evaluate(alg, task, PER_CLIENT, rounds=5)
    for plan in (EAGER, Plan("stacked", "traced", chunk=5, shrink=0)):
        assert_same(alg, task, plan, 1e-9, rounds=5, reference=reference)


@pytest.mark.parametrize(("name", "settings"), EXTRA_LOSSES, ids=variant_id)
def test_a_variant_gives_the_same_on_sequences_stacked_and_client_by_client(name, settings):
    run = assert_same(method(name, **settings), token_task(), Plan("stacked", "traced", chunk=3, shrink=0), 1e-9)
    assert_finite(run)


@pytest.mark.parametrize(("name", "settings"), EXTRA_LOSSES, ids=variant_id)
def test_every_known_position_of_a_sequence_is_a_sample(name, settings):
    """A step on two sequences and a padded one is a step on their five known positions; so is every other pass."""
    task, alg = token_task(), method(name, **settings)
    x = torch.tensor([[0, 1, 2, 3], [4, 0, 1, 2], [1, 1, 1, 1]])
    y = torch.tensor([[1, 2, -1, -1], [3, 0, 4, -1], [0, 0, 0, 0]])
    known = (y >= 0) & torch.tensor([True, True, False])[:, None]
    info = client_info([1, 1, 1, 1, 1], first=False)
    down = alg.init_server(task, 1)
    state = client_state(SingleRun(alg, task, 2, plan=EAGER), i=0)
    if name == "fedproto":
        down = {"G": tensor(np.random.default_rng(0).normal(size=(5, 6))), "known": torch.arange(5) != 2}
    found = []
    for batch in (make_batch(x, y, [1, 1, 0]), make_batch(x[known], y[known])):
        work = alg.begin(task, down, state, info)
        for phase in alg.phases(task):
            work = work if phase.enter is None else phase.enter(task, work, down, info)
            work = phase.step(task, work, batch, down, info) if phase.epochs != 0 else work
        found.append(leaves(work))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)
    begun = leaves(alg.begin(task, down, state, info))
    assert any(not torch.equal(a, b) for a, b in zip(found[0], begun, strict=False))
