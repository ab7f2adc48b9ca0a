"""Identities between methods, and what holds for all of them."""

import random

import numpy as np
import pytest
import torch
from helpers import RAGGED, SingleRun, SmallNet, make_federation, make_task, method, methods

from fedloom.core.errors import UserError
from fedloom.core.task import Task
from fedloom.core.tree import leaves
from fedloom.engine.planning.plan import Plan
from fedloom.models.zoo import MODELS
from fedloom.nn.network import Network
from fedloom.studies.build import check

PLAN = Plan("stacked", "eager", chunk=len(RAGGED))


def play(alg, task, rounds=3, seed=3, evaluate=False):
    run = SingleRun(alg, task, seed, plan=PLAN)
    records = [run.advance(evaluate=evaluate) for _ in range(rounds)]
    return run, records


def same(a, b, tolerance=1e-12):
    flat_a, flat_b = leaves(a), leaves(b)
    return len(flat_a) == len(flat_b) and all(
        torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(flat_a, flat_b, strict=True)
    )


def test_fedprox_without_its_term_is_fedavg():
    task = make_task(RAGGED, participation=0.5)
    assert same(play(method("fedprox", mu=0.0), task)[0].server, play(method("fedavg"), task)[0].server)


def test_fedavg_ft_without_epochs_scores_as_fedavg():
    task = make_task(RAGGED)
    _, tuned = play(method("fedavg-ft", ft_epochs=0), task, evaluate=True)
    _, plain = play(method("fedavg"), task, evaluate=True)
    for a, b in zip(tuned, plain, strict=True):
        np.testing.assert_allclose(a.scores["pre"]["test"], b.scores["global"]["test"], rtol=1e-9)


def test_fedavg_ft_on_the_head_leaves_the_body():
    task = make_task(RAGGED)
    alg = method("fedavg-ft", ft_scope="head")
    work = {"w": task.slot(task.init(0))}
    batch = next(_batches(task))
    tuned = alg.fine_tune(task, work, batch, {}, None)["w"].params
    assert same(task.body(tuned), task.body(work["w"].params))
    assert not same(task.head(tuned), task.head(work["w"].params))


def _batches(task):
    from fedloom.core.algorithm import Phase
    from fedloom.engine import batching as schedule

    return schedule.build(task, Phase(lambda *a: None), 0, np.array([1]), 0, np.array([1])).batches(task, 0)


def test_ditto_keeps_fedavg_as_its_global_model_and_sees_its_batches():
    task = make_task(RAGGED, participation=0.5, epochs=2)
    assert same(play(method("ditto"), task)[0].server["w"], play(method("fedavg"), task)[0].server["w"])


def test_ditto_without_pull_is_local():
    task = make_task(RAGGED, participation=0.5)
    ditto = play(method("ditto", lam=0.0), task)[0].store.everyone()["own"]["v"]
    assert same(ditto, play(method("local"), task)[0].store.everyone()["own"]["theta"])


def test_fedrep_without_body_epochs_leaves_the_body():
    task = make_task(RAGGED)
    run, _ = play(method("fedrep", body_epochs=0), task)
    assert same(run.server["phi"], task.body(task.init(run.key)))


def test_scaffold_starts_as_fedavg_with_equal_weights():
    """All control variates are zero in the first round."""
    task = make_task((12, 12, 12))
    assert same(play(method("scaffold"), task, rounds=1)[0].server["w"], play(method("fedavg"), task, 1)[0].server["w"])


def test_scaffold_keeps_a_control_variate_where_batchnorm_allows_no_step():
    task = make_task((1, 20, 20), norm=True)
    run, _ = play(method("scaffold"), task)
    assert all((v[0] == 0).all() for v in run.store.everyone()["own"]["c"].values())
    assert any((v[1] != 0).any() for v in run.store.everyone()["own"]["c"].values())


def test_a_single_layer_has_nothing_to_share():
    data = make_federation(RAGGED)
    network = Network(lambda: MODELS["logreg"]().build((6,), 4), "head", data.x[:2], data.dtype)
    task = Task(data, network, lr=0.1)
    for name in ("fedper", "fedrep"):
        with pytest.raises(UserError, match="allow_degenerate=true"):
            check(method(name), task)
    degenerate = method("fedper", allow_degenerate=True)
    check(degenerate, task)
    own = play(degenerate, task)[0].store.everyone()["own"]["h"]
    assert same(own, play(method("local"), task)[0].store.everyone()["own"]["theta"])


@pytest.mark.parametrize("name", [n for n in methods() if n not in ("fedavg", "local")])
def test_with_its_defaults_no_method_is_fedavg_or_local(name):
    """Models that every client would use, after two rounds: predictions of all views on all samples."""
    task = make_task(RAGGED, lr=0.1, data={"server": 20})
    alg = method(name)

    def views(alg):
        _, records = play(alg, task, rounds=2, evaluate=True)
        return {view: found["test"] for view, found in records[-1].scores.items()} | {
            "train": records[-1].scores["pre"]["train"]
        }

    mine = views(alg)
    for other in ("fedavg", "local"):
        theirs = views(method(other))
        common = mine.keys() & theirs.keys()
        assert not all(np.allclose(mine[v], theirs[v], rtol=1e-12, atol=1e-12) for v in common), other


@pytest.mark.parametrize("name", methods())
def test_global_random_generators_neither_matter_nor_move(name):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        alg, task = method(name), make_task((20, 33, 21, 27), dropout=0.2, data={"server": 20})
        run, _ = play(alg, task, rounds=2, evaluate=True)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        found.append((run.server, run.store.everyone()))
    assert same(*found, tolerance=0)


@pytest.mark.parametrize("name", methods())
def test_a_client_that_is_not_sampled_keeps_its_state(name):
    alg = method(name)
    if not alg.partial:
        pytest.skip(f"{name} needs all clients in every round")
    task = make_task([max(n, alg.min_samples(make_task(RAGGED))) for n in RAGGED], data={"server": 20})
    run = SingleRun(alg, task, 0, plan=PLAN)
    run.advance(evaluate=False, cohort=np.array([0, 1, 2]))
    before = [v.clone() for v in leaves(run.store.everyone())]
    run.advance(evaluate=False, cohort=np.array([1, 4]))
    for old, new in zip(before, leaves(run.store.everyone()), strict=True):
        still = [i for i in range(len(RAGGED)) if i not in (1, 4)]
        assert torch.equal(old[still], new[still])


def test_a_client_that_never_trained_is_served_by_the_global_model():
    """Ditto's personal model is a copy of its own, so until it exists the global one serves."""
    task = make_task(RAGGED)
    run = SingleRun(method("ditto"), task, 0, plan=PLAN)
    scores = run.advance(cohort=np.array([1, 4])).scores
    fresh = [i for i in range(len(RAGGED)) if i not in (1, 4)]
    np.testing.assert_allclose(scores["pre"]["test"][fresh], scores["global"]["test"][fresh])
    np.testing.assert_allclose(scores["post"]["test"][fresh], scores["global"]["test"][fresh])
    assert not np.allclose(scores["pre"]["test"][[1, 4]], scores["global"]["test"][[1, 4]])


def test_a_late_first_participation_starts_from_the_initial_head_and_the_newest_body():
    task = make_task(RAGGED)
    run = SingleRun(method("fedper"), task, 0, plan=PLAN)
    for _ in range(3):
        run.advance(evaluate=False, cohort=np.array([1, 4]))
    own = {k: v[0] for k, v in run.store.everyone()["own"]["h"].items()}
    assert same(own, task.head(task.init(run.key)))
    assert not same(run.server["phi"], task.body(task.init(run.key)))


def test_post_scores_stay_those_of_the_last_participation():
    task = make_task(RAGGED)
    run = SingleRun(method("fedavg"), task, 0, plan=PLAN)
    first = run.advance(cohort=np.array([0, 1])).scores["post"]["test"]
    second = run.advance(cohort=np.array([2, 3])).scores["post"]["test"]
    np.testing.assert_array_equal(first[:2], second[:2])


def test_scores_are_those_of_the_right_model():
    """PM_pre, PM_post and GM of FedPer and FedAvg against a forward pass by hand."""
    import torch.nn.functional as F

    task = make_task((9, 14, 5))
    data = task.data

    def by_hand(params, i):
        net = SmallNet().double()
        net.load_state_dict(params)
        rows = data.splits["test"][i]
        return float(F.cross_entropy(net(data.x[rows]), data.y[rows], reduction="sum").detach())

    run, records = play(method("fedper"), task, evaluate=True)
    heads = run.store.everyone()["own"]["h"]
    for i in range(3):
        params = {**run.server["phi"], **{k: v[i] for k, v in heads.items()}}
        assert records[-1].scores["pre"]["test"][i, 1] == pytest.approx(by_hand(params, i), rel=1e-9)
    run, records = play(method("fedavg"), task, evaluate=True)
    for i in range(3):
        assert records[-1].scores["global"]["test"][i, 1] == pytest.approx(by_hand(run.server["w"], i), rel=1e-9)
    run, records = play(method("local"), task, evaluate=True)
    for i in range(3):
        params = {k: v[i] for k, v in run.store.everyone()["own"]["theta"].items()}
        assert records[-1].scores["post"]["test"][i, 1] == pytest.approx(by_hand(params, i), rel=1e-9)


def test_traffic_is_what_the_specification_lists():
    """Parameters of the small net: body 6*8 + 8 = 56, head 8*4 + 4 = 36, in float64; 12 clients."""
    body, head, m = 56 * 8, 36 * 8, len(RAGGED)
    expected = {
        "local": (0, 0),
        "fedavg": (body + head, body + head),
        "fedavg-ft": (body + head, body + head),
        "fedprox": (body + head, body + head),
        "ditto": (body + head, body + head),
        "scaffold": (2 * (body + head), 2 * (body + head)),
        "fedper": (body, body),
        "fedrep": (body, body),
        **dict.fromkeys(
            (
                "page",
                "fedrod",
                "fedphp",
                "fedala",
                "fml",
                "moon",
                "fedsam",
                "feddyn",
                "per-fedavg",
                "pfedme",
                "mapper",
                "partialfed",
                "dap-fl",
            ),
            (body + head, body + head),
        ),
        "fedrecon": (body, body),
        "lg-fedavg": (head, head),
        "hypcluster": (2 * (body + head), body + head + 8),  # the index of a model is an int64
        "fedfomo": (0, body + head + 5 * 8),  # nobody has uploaded before the first round
        "fedproto": (4 * 8 * 8 + 4, 4 * 8 * 8 + 4),  # prototypes in float64, and a byte per class
    }
    task = make_task(RAGGED, data={"server": 20})
    for name, (down, up) in expected.items():
        small = {"allow_small": True} if name == "per-fedavg" else {}
        done = play(method(name, **small), task, rounds=1)[1][0]
        assert (done.bytes_down, done.bytes_up) == (m * down, m * up), name


def test_running_statistics_stay_with_their_client_and_are_averaged_for_the_server_only():
    task = make_task((8, 20, 30), norm=True, data={"server": 10})
    run, records = play(method("fedavg"), task, rounds=2, evaluate=True)
    means = run.store.everyone()["stats"]["w"]["norm.running_mean"]
    assert not torch.allclose(means[0], means[1])
    weights = torch.tensor([8, 20, 30], dtype=torch.float64) / 58
    expected = (weights[:, None] * means).sum(0)
    torch.testing.assert_close(run.stats["w"]["norm.running_mean"], expected)
    assert records[-1].server is not None
    assert set(run.server) == {"w"}
    assert not any("running" in k for k in run.server["w"])


def test_scaffolds_server_variate_counts_clients_that_are_not_sampled():
    """c = c + (1/N) sum over the cohort of Delta c_i, with N = 4 also when two take part."""
    task = make_task((12, 20, 7, 15))
    run = SingleRun(method("scaffold"), task, 0, plan=PLAN)
    run.advance(evaluate=False, cohort=np.array([1, 3]))
    own = run.store.everyone()["own"]["c"]
    for name, c in run.server["c"].items():
        torch.testing.assert_close(c, (own[name][1] + own[name][3]) / 4)


def test_running_statistics_continue_where_the_client_left_off():
    """With a vanishing learning rate the batch mean m never changes, so after k steps the running mean is
    (1 - 0.9^k) m; 3 rounds of 2 epochs with one batch each are 6 steps."""
    task = make_task((8, 9), norm=True, lr=1e-14, epochs=2)
    run, _ = play(method("fedavg"), task)
    w = task.init(run.key)
    for i in range(2):
        x = task.data.x[task.data.splits["train"][i]]
        mean = (x @ w["first.weight"].T + w["first.bias"]).mean(0)
        torch.testing.assert_close(run.store.everyone()["stats"]["w"]["norm.running_mean"][i], (1 - 0.9**6) * mean)
