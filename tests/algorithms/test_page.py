"""PAGE: actions and rewards, a second implementation, agents, the server's data, what diverges, what is refused."""

import dataclasses
import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EAGER,
    PER_CLIENT,
    RAGGED,
    SingleRun,
    assert_same,
    client_state,
    make_federation,
    make_task,
    make_unfinished,
    method,
    run_and_evaluate,
    run_rounds,
    tensor,
)
from kills import assert_same_files
from oracles import (
    LEARNING_AGENTS,
    UniformFedAvg,
    assert_equal,
    assert_finite,
    assert_near,
    assert_same_scores,
    average,
    client_samples,
    full_batch_run,
    measure,
    net_of,
)
from sentences import user_error

import fedloom
from fedloom.algorithms.page import PAGE
from fedloom.algorithms.parts import server_data
from fedloom.core.tree import size_bytes, take, tree_map
from fedloom.data.divide import hold_out_server
from fedloom.engine.plan import Plan
from fedloom.runs.checkpoints import Checkpoints
from fedloom.studies.build import check

SIZES = (3, 17, 8, 11)


def page_task(sizes=SIZES, server=30, **settings):
    return make_task(sizes, data={"server": server}, **{"rounds": 6, **settings})


# -- actions, weights and rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "eta", "alpha"), [((-1, -1), 0.01, 1), ((0, 0), 0.105, 11), ((1, 1), 0.2, 20), ((0.5, -0.5), 0.1525, 6)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_decoding_an_action(a, eta, alpha, dtype):
    """The ranges of CIFAR-100."""
    found = method("page", lr_min=0.01, lr_max=0.2).decoded(torch.tensor(a, dtype=dtype))
    assert (float(found[0]), int(found[1])) == (pytest.approx(eta), alpha)


@pytest.mark.parametrize(
    ("a", "eta", "alpha"), [((-1, -1), 0.01, 1), ((0, 0), 0.2, 20), ((1, 1), 0.2, 20), ((-0.875, -0.75), 0.0625, 12)]
)
def test_decoding_an_action_as_the_authors_code_does(a, eta, alpha):
    """(a + 1) / 2 cut to [0.01, 0.2]; epochs are 100 times as much, rounded down: 12.5 gives 12."""
    found = method("page", lr_min=0.01, lr_max=0.2, decode="clip").decoded(tensor(a))
    assert (float(found[0]), int(found[1])) == (pytest.approx(eta), alpha)


def test_every_number_of_epochs_can_be_chosen_and_no_other():
    a = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    alpha = torch.stack([method("page").decoded(torch.stack([v, v]))[1] for v in a])
    assert alpha.unique().tolist() == list(range(1, 21))
    assert (alpha.diff() >= 0).all()


def test_weights_from_an_action():
    """bounded: (1, 1.5, 0.5) / 3 and, with a quarter of the range, (1, 1.25, 0.75) / 3. shift: (1, 2, 0) / 3."""
    assert method("page").weights(tensor([0, 1, -1])).tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 6])
    assert method("page", p_range=0.25).weights(tensor([0, 1, -1])).tolist() == pytest.approx([1 / 3, 5 / 12, 1 / 4])
    shift = method("page", p_map="shift")
    torch.testing.assert_close(shift.weights(tensor([0, 1, -1])), tensor([1 / 3, 2 / 3, 0]), rtol=0, atol=1e-8)
    nobody = shift.weights(torch.full((4,), -1.0))  # in float32, all at the lower end
    torch.testing.assert_close(nobody, torch.full((4,), 0.25))
    soft = method("page", p_map="softmax").weights(tensor([0, 1, -1]))
    torch.testing.assert_close(soft, tensor([0.244728, 0.665241, 0.090031]), rtol=0, atol=1e-6)


def test_rewards():
    """2 / (0.5 + 1e-5); the cap comes before the weight; what diverged earns nothing."""
    alg, yes = method("page", R_max=50.0), torch.tensor(True)
    assert float(alg.reward(2.0, tensor(0.5), yes)) == pytest.approx(2 / 0.50001)
    assert float(alg.reward(2.0, tensor(0.0), yes)) == 100
    assert float(alg.reward(2.0, tensor(0.5), ~yes)) == 0
    for loss in (torch.inf, torch.nan):
        assert float(alg.reward(2.0, tensor(loss), yes)) == 0


def test_equilibrium_is_when_neither_mean_has_risen_by_a_tenth_of_a_point():
    alg = method("page", patience=20)

    def at_equilibrium(global_, local, every=1):
        last = every * len(global_)
        rounds = range(every, last + 1, every)
        scores = zip(rounds, global_, local, strict=True)
        return alg.report_round([{"round": t, "acc_global": g, "post_acc_mean": p} for t, g, p in scores])[
            "equilibrium"
        ]

    flat = [50.0] * 30
    assert at_equilibrium(flat, flat)
    assert not at_equilibrium(flat[:20], flat[:20])  # there is no round to compare with yet
    assert at_equilibrium(flat[:21], flat[:21])
    assert at_equilibrium([50 - t for t in range(30)], flat)
    for rise, there in ((0.11, False), (0.09, True)):  # one of the two still rises
        rising = [*[50.0] * 20, *[50 + rise] * 10]
        assert at_equilibrium(rising, flat) == at_equilibrium(flat, rising) == there
    early = [40.0] * 3 + [50.0] * 20  # the means of rounds 1..3 and 14..23
    assert not at_equilibrium(early, flat[:23])
    assert at_equilibrium(flat[:4], flat[:4], every=15)  # evaluated in rounds 15, 30, 45, 60
    assert not at_equilibrium([50, 50, 50, 51], flat[:4], every=15)


def test_a_run_may_end_at_equilibrium_and_is_resumed_into_the_same_end(tmp_path):
    def stop(done, total, row):
        if done == 3:
            raise KeyboardInterrupt

    task = {"server_share": 0.1, "clients": 4, "plan": "stacked-eager", "checkpoint_every": 1, "batch_size": 100}
    frozen = {**task, "rounds": 9, "ep_max": 1, "patience": 3, "lr_min": 1e-9, "lr_max": 1e-9}  # nothing moves
    settings = {**frozen, "stop_at_equilibrium": True}
    result = fedloom.run("page", out=tmp_path / "whole", **settings)
    assert [row["equilibrium"] for row in result.rounds] == [False, False, False, True]
    with pytest.raises(KeyboardInterrupt):
        fedloom.run("page", out=tmp_path / "again", on_round=stop, **settings)
    fedloom.run("page", out=tmp_path / "again", resume=True, **settings)
    assert_same_files(tmp_path / "again", tmp_path / "whole")
    to_the_end = fedloom.run("page", **{**frozen, "rounds": 6})
    assert [row["equilibrium"] for row in to_the_end.rounds] == [False] * 3 + [True] * 3
    assert "equilibrium" not in fedloom.run("fedavg", **{**task, "rounds": 1}).last()


# -- a second implementation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", ["relative", "global", "weighted_local"])
@pytest.mark.parametrize("signal", ["train", "test"])
def test_page_against_plain_pytorch_given_the_actions(signal, reward):
    """Steps 2 to 11 of a round. Agents learn from the third round on; what they chose is taken from the reports and the
    server's agent, everything that follows from it is computed again."""
    alg = method(
        "page",
        client_signal=signal,
        server_reward=reward,
        fallback=reward == "relative",
        local_clip=0.3,
        c_w=2.0,
        s_w=3.0,
        R_max=100.0 if reward == "relative" else 1.5,
        **LEARNING_AGENTS,
    )
    limit, fell_back = alg.R_max, []
    run, plain = full_batch_run(alg, SIZES, data={"server": 30})
    w, data = plain.initial, run.task.data
    samples = client_samples(run.task, signal)
    server_samples = data.x[data.server], data.y[data.server]

    def reward_of(weight, loss):
        return weight * min(1 / (loss + 1e-5), limit)

    payoff, server_payoff = np.zeros(len(SIZES)), 0.0
    for t in range(6):
        done = run.advance(evaluate=False)
        found, server = done.reports, done.server_report
        assert found["state"] == pytest.approx([measure(w, samples[i])[0] for i in plain.clients])  # step 2
        states = [
            plain.fit(w, plain.train[i], epochs=int(found["alpha"][i]), lr=found["eta"][i], clip=0.3)
            for i in plain.clients
        ]  # step 5
        f = [measure(states[i], samples[i])[1] for i in plain.clients]
        assert found["reward"] == pytest.approx([reward_of(2, v) for v in f], rel=1e-9)  # step 6
        assert run.server["s"].tolist() == pytest.approx([measure(s, server_samples)[0] for s in states])  # step 7
        p, equal = alg.weights(run.server["agent"]["last"]["a"]).numpy(), np.full(len(SIZES), 1 / len(SIZES))
        models = average(states, p), average(states, equal)  # step 10
        losses = [measure(model, server_samples)[1] for model in models]
        fell_back.append(reward == "relative" and losses[0] > losses[1])
        w, used = (models[1], equal) if fell_back[-1] else (models[0], p)
        assert found["p"] == pytest.approx(used)
        rewards = [reward_of(3, loss) for loss in losses]
        expected = {"relative": rewards[0] - rewards[1], "global": rewards[0]}
        expected["weighted_local"] = reward_of(3, float(np.dot(p, f)))
        assert server["reward_CS"] == pytest.approx(expected[reward], rel=1e-8)  # step 11
        payoff += 0.99**t * found["reward"]
        server_payoff += 0.99**t * server["reward_CS"]
        assert found["U"] == pytest.approx(payoff)
        assert server["U_CS"] == pytest.approx(server_payoff)
    assert_near(run.server["w"], w, 1e-9)
    assert client_state(run, "agent")["updates"].tolist() == [4] * len(SIZES)
    assert run.server["agent"]["updates"] == 4
    assert any(fell_back) == (reward == "relative")


def test_agents_of_clients_may_see_validation_samples_instead():
    """Where validation and test samples are the same, it does not matter which of them the agents see."""
    task = page_task()
    splits = {**task.data.splits, "val": task.data.splits["test"]}
    task = dataclasses.replace(task, data=dataclasses.replace(task.data, splits=splits))
    rewards = {}
    for name in ("val", "test", "train"):
        records = run_rounds(method("page", client_signal=name), task)[1]
        rewards[name] = np.stack([done.reports["reward"] for done in records])
    np.testing.assert_array_equal(rewards["val"], rewards["test"])
    assert not np.allclose(rewards["val"], rewards["train"])


def test_agents_remember_the_transitions_of_the_specification():
    """(s(t-1), a(t-1), r(t-1), s(t)): of a client what it reports, of the server its states and rewards."""
    alg, task = method("page", fallback=False, **LEARNING_AGENTS), page_task()
    run = SingleRun(alg, task, 1, plan=EAGER)
    records, seen = [], []
    for _ in range(5):
        records.append(run.advance(evaluate=False))
        seen.append(run.server["s"])
    reported = {name: np.stack([done.reports[name] for done in records]) for name in records[0].reports}
    agents = client_state(run, "agent")
    assert agents["stored"].tolist() == [4] * len(SIZES)
    for i in range(len(SIZES)):
        replay = take(agents["replay"], i)
        assert replay["s"][:4, 0].tolist() == pytest.approx(reported["state"][:4, i])
        assert replay["next"][:4, 0].tolist() == pytest.approx(reported["state"][1:, i])
        assert replay["r"][:4].tolist() == pytest.approx(reported["reward"][:4, i])
        for t in range(4):
            eta, alpha = alg.decoded(replay["a"][t])
            assert (float(eta), int(alpha)) == (pytest.approx(reported["eta"][t, i]), reported["alpha"][t, i])
    replay = run.server["agent"]["replay"]
    torch.testing.assert_close(replay["s"][:4], torch.stack(seen[:4]))
    torch.testing.assert_close(replay["next"][:4], torch.stack(seen[1:]))
    assert replay["r"][:4].tolist() == pytest.approx([done.server_report["reward_CS"] for done in records[:4]])
    for t in range(4):
        assert alg.weights(replay["a"][t]).tolist() == pytest.approx(reported["p"][t])


# -- invariants -------------------------------------------------------------------------------------------------------


def test_with_all_switches_off_it_is_fedavg_with_equal_weights():
    alg = method("page", tune_p=False, tune_eta=False, tune_alpha=False, lr_max=0.07, ep_max=3)
    run, records = run_rounds(alg, page_task(RAGGED), evaluate=True)
    fedavg, expected = run_rounds(UniformFedAvg(), page_task(RAGGED, lr=0.07, epochs=3, clip=10.0), evaluate=True)
    assert_near(run.server["w"], fedavg.server["w"])
    assert_same_scores(records, expected)
    for done in records:
        np.testing.assert_allclose(done.reports["p"], 1 / len(RAGGED))


@pytest.mark.parametrize(("p", "eta", "alpha"), list(itertools.product((True, False), repeat=3)))
def test_there_are_the_agents_that_are_needed_and_no_others(p, eta, alpha):
    """The seven variants of the ablation, and none of them; what is not tuned is 1/N, lr_max, ep_max."""
    alg = method("page", tune_p=p, tune_eta=eta, tune_alpha=alpha, **LEARNING_AGENTS)
    run, records = run_rounds(alg, page_task(), evaluate=True, rounds=4)
    assert ("agent" in run.server) == p
    assert ("agent" in client_state(run)) == (eta or alpha)
    if eta or alpha:
        assert client_state(run, "agent")["updates"].tolist() == [2] * len(SIZES)
    tuned = {"p": p, "eta": eta, "alpha": alpha}
    for name, fixed in (("p", 1 / len(SIZES)), ("eta", 0.1), ("alpha", 4)):
        found = np.stack([done.reports[name] for done in records])
        assert np.allclose(found, fixed) != tuned[name], name


@pytest.mark.parametrize("p_map", ["shift", "softmax"])
def test_weights_add_up_to_one_in_every_round(p_map):
    _, records = run_rounds(method("page", p_map=p_map, **LEARNING_AGENTS), page_task(RAGGED), evaluate=True, rounds=5)
    for done in records:
        assert done.reports["p"].sum() == pytest.approx(1, abs=1e-12)
        assert (done.reports["p"] >= 0).all()


@pytest.mark.parametrize(("reward", "extra"), [("global", 0), ("weighted_local", 8)])
def test_agents_are_never_sent(reward, extra):
    """Down goes the model, up the model, and for the paper's reward one number in float64."""
    run, records = run_rounds(method("page", server_reward=reward), page_task(), evaluate=True, rounds=1)
    model = size_bytes(run.server["w"])
    assert records[0].bytes_down == len(SIZES) * model
    assert records[0].bytes_up == len(SIZES) * (model + extra)


def test_a_replay_memory_is_no_larger_than_the_number_of_rounds():
    task = page_task(rounds=6)
    for settings, capacity in (({}, 6), ({"replay": 4}, 4)):
        run = SingleRun(method("page", **settings), task, 0, plan=EAGER)
        assert client_state(run, "agent")["replay"]["r"].shape == (len(SIZES), capacity)


def test_the_agents_of_clients_start_from_different_values():
    agents = client_state(SingleRun(method("page"), page_task(), 0, plan=EAGER), "agent")
    first = agents["nets"]["actor"]
    assert len({tuple(v.flatten().tolist()) for v in first}) == len(SIZES)


# -- stacked, resumed, recorded ---------------------------------------------------------------------------------------

VARIANTS = [
    {},
    {"decode": "clip", "lr_max": 0.6, "p_map": "softmax", "server_reward": "weighted_local", "fallback": False},
    {"client_signal": "test", "tune_p": False, "local_clip": None},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(v) or "default")
def test_agents_that_learn_do_the_same_stacked_and_client_by_client(variant):
    """Clients of one to sixty samples; the memory of four wraps around."""
    alg = method("page", **{**LEARNING_AGENTS, "replay": 4, **variant})
    task = page_task(RAGGED[:6], rounds=7)
    run, _ = reference = run_and_evaluate(alg, task, PER_CLIENT, rounds=7)
    for plan in (Plan("stacked", "eager", chunk=4), Plan("stacked", "traced", chunk=4, shrink=0.3)):
        assert_same(alg, task, plan, 1e-9, rounds=7, reference=reference)
    assert client_state(run, "agent")["updates"].tolist() == [5] * 6
    assert client_state(run, "agent")["stored"].tolist() == [6] * 6


def test_agents_that_learn_are_resumed_from_a_checkpoint_to_the_bit(tmp_path):
    alg, task = method("page", **LEARNING_AGENTS), page_task()
    whole, first, second = (SingleRun(alg, task, 3, plan=EAGER) for _ in range(3))
    for _ in range(4):
        whole.advance()
        first.advance()
    Checkpoints(tmp_path).save(first)
    Checkpoints(tmp_path).restore(second)
    for _ in range(2):
        a, b = whole.advance(), second.advance()
    assert_equal((whole.server, client_state(whole)), (second.server, client_state(second)))
    assert a.server_report == b.server_report
    assert all((a.reports[name] == b.reports[name]).all() for name in a.reports)


def test_what_is_reported_reaches_the_records():
    result = fedloom.run("page", "synthetic", clients=4, rounds=2, ep_max=2, plan="stacked-eager")
    *clients, server = result.reports.to_pylist()[:5]
    assert all(row[name] is not None for row in clients for name in ("reward", "U", "eta", "alpha", "state", "p"))
    assert sum(row["p"] for row in clients) == pytest.approx(1, abs=1e-6)
    assert server["client"] == -1
    assert server["reward_CS"] > 0
    assert server["U_CS"] == pytest.approx(server["reward_CS"])


# -- the server's data ------------------------------------------------------------------------------------------------


def test_dcs_holdout_divides_the_servers_samples_into_those_that_reward_and_those_that_test():
    alg, task = method("page", tune_p=False, server_reward="global"), page_task(server=30)
    all_ = task.data.server
    assert task.data.server_signal is task.data.server_test is all_
    task = dataclasses.replace(task, data=hold_out_server(task.data, 0.4))
    signal, test = task.data.server_signal, task.data.server_test
    assert (len(signal), len(test)) == (18, 12)
    assert sorted([*signal.tolist(), *test.tolist()]) == all_.tolist()
    run, records = run_rounds(alg, task, evaluate=True, rounds=2)
    acc, _ = measure(run.server["w"], (task.data.x[test], task.data.y[test]))
    _, loss = measure(run.server["w"], (task.data.x[signal], task.data.y[signal]))
    right, _, n = records[-1].server
    assert (right / n, n) == (pytest.approx(acc), 12)
    assert records[-1].server_report["reward_CS"] == pytest.approx(1 / (loss + 1e-5))


def test_dcs_holdout_gives_all_methods_of_a_comparison_the_same_test_samples(tmp_path):
    settings = {"server_share": 0.2, "dcs_holdout": 0.5, "rounds": 1, "clients": 5}
    fedloom.compare(["fedavg", "page"], seeds=1, out=tmp_path / "both", **settings)
    tables = [pq.read_table(file) for file in sorted((tmp_path / "both").rglob("partition.parquet"))]
    assert len(tables) == 3  # with Local
    server = [table.filter(table["client"].to_numpy() == -1).to_pylist()[0] for table in tables]
    assert [(len(row["train"]), len(row["test"])) for row in server] == [(179, 180)] * 3
    assert server[0]["test"] == server[1]["test"] == server[2]["test"]
    with user_error("dcs_holdout=0.5", "it has none", "server_share"):
        fedloom.run("fedavg", dcs_holdout=0.5)


# -- an agent that cannot do harm -------------------------------------------------------------------------------------


def test_the_server_never_takes_weights_that_are_worse_on_its_samples():
    """In every round, the loss of W on the server's samples is at most that of the equal average of the same models."""
    alg, task = method("page", p_range=1.0, **LEARNING_AGENTS), page_task(rounds=8)
    run = SingleRun(alg, task, 0, plan=EAGER)
    data, chose = task.data, []
    for _ in range(8):
        done = run.advance(evaluate=False)
        w, r = run.server["w"], done.server_report["reward_CS"]
        loss = measure(w, (data.x[data.server], data.y[data.server]))[1]
        chose.append(not np.allclose(done.reports["p"], 1 / len(SIZES)))
        assert chose[-1] == (r > 0)
        if r > 0:  # r = 1/loss - 1/loss of equal weights
            assert 1 / (loss + 1e-5) > 1 / (loss + 1e-5) - r > 0
    assert any(chose)
    assert not all(chose)


def test_a_reward_that_only_rises_with_the_rounds_does_not_move_the_relative_agent():
    """The trend of training is in 1/F_CS(W) and not in the relative reward: with equal models it is 0 in all rounds,
    whatever the action."""
    task = page_task(server=30)
    alg = method("page", **LEARNING_AGENTS)
    run = SingleRun(alg, task, 0, plan=EAGER)
    w = task.init(5)
    up = {"w": {k: v.expand(len(SIZES), *v.shape).clone() for k, v in w.items()}}
    info = SimpleNamespace(id=torch.arange(len(SIZES)), t=torch.zeros(len(SIZES), dtype=torch.int64))
    for scale in (1.0, 0.5, 0.1):
        scaled = {"w": {k: scale * v for k, v in up["w"].items()}}
        server = alg.aggregate(task, run.server, scaled, info, 0, 3)
        assert float(server["r"]) == pytest.approx(0, abs=1e-12)


def test_scoring_in_blocks_of_samples_and_models_gives_the_same(monkeypatch):
    task = page_task(server=30)
    models = client_state(SingleRun(method("local"), task, 0, plan=EAGER), "theta")
    models = {k: v * torch.arange(4).view(-1, *[1] * (v.dim() - 1)) for k, v in models.items()}  # the first ties
    samples = task.data.x[task.data.server], task.data.y[task.data.server]
    expected = [measure(take(models, i), samples) for i in range(4)]
    for samples, rows in ((512, 4096), (7, 15), (30, 1)):
        monkeypatch.setattr(server_data, "SAMPLES", samples)
        monkeypatch.setattr(server_data, "ROWS", rows)
        found = server_data.accuracies(task, models, task.data.server)
        assert found.tolist() == pytest.approx([acc for acc, _ in expected])
        for i, (_, loss) in enumerate(expected):
            assert float(server_data.mean_loss(task, take(models, i), task.data.server)) == pytest.approx(loss)


def test_batchnorm_uses_the_statistics_of_the_servers_samples():
    task = page_task(server=30, norm=True)
    w = task.init(0)
    x, y = (v[task.data.server] for v in (task.data.x, task.data.y))
    logits = net_of(w, norm=True).train()(x).detach()
    (acc,) = server_data.accuracies(task, tree_map(lambda v: v[None], w), task.data.server)
    assert float(acc) == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    loss = server_data.mean_loss(task, w, task.data.server)
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, y)))


# -- what goes wrong --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diverging(PAGE):
    """Some clients end up with a parameter that is no number."""

    who: tuple[int, ...] = ()

    def step(self, task, work, batch, down, info):
        work = super().step(task, work, batch, down, info)
        here = torch.stack([info.id == i for i in self.who]).any()
        params = {**work["w"].params}
        params["head.bias"] = torch.where(here, torch.nan, params["head.bias"])
        return {**work, "w": work["w"]._replace(params=params)}


@pytest.mark.parametrize("plan", [PER_CLIENT, EAGER], ids=lambda p: p.mode)
@pytest.mark.parametrize("reward", ["global", "weighted_local"])
def test_a_client_that_diverges_is_left_out(plan, reward):
    alg = Diverging(who=(1,), server_reward=reward, **LEARNING_AGENTS)
    run, records = run_rounds(alg, page_task(), rounds=4, plan=plan, evaluate=True)
    for done in records:
        p = done.reports["p"]
        assert p[1] == done.reports["reward"][1] == 0
        assert p.sum() == pytest.approx(1)
        assert (np.delete(p, 1) > 0).all()
        assert (np.delete(done.reports["reward"], 1) > 0).all()
        assert done.server_report["reward_CS"] > 0
    assert run.server["s"][1] == 0
    assert_finite(run)


def test_if_all_diverge_the_model_is_kept():
    run, records = run_rounds(Diverging(who=(0, 1, 2, 3), **LEARNING_AGENTS), page_task(), evaluate=True, rounds=3)
    assert_equal(run.server["w"], run.task.init(run.key))
    assert records[-1].reports["p"].tolist() == [0] * 4
    assert records[-1].server_report["reward_CS"] == 0
    assert_finite(run)


def test_a_reply_that_is_missing_is_left_out_and_its_state_kept():
    """In a federation; a simulation refuses partial participation."""
    alg, task = method("page", **LEARNING_AGENTS), page_task()
    run = SingleRun(alg, task, 0, plan=EAGER)
    run.advance(evaluate=False)
    before = run.server["s"].clone()
    done = run.advance(evaluate=False, cohort=np.array([0, 1, 3]))
    assert run.server["s"][2] == before[2]
    assert run.server["p"][2] == 0
    assert run.server["p"].sum() == pytest.approx(1)
    assert done.reports["p"].tolist() == run.server["p"][[0, 1, 3]].tolist()
    run.advance(evaluate=False)
    assert client_state(run, "agent")["stored"].tolist() == [2, 2, 1, 2]


def test_what_does_not_fit_is_refused_before_training():
    with user_error("page", "data at the server", "server_share"):
        check(method("page"), make_task(SIZES))
    with user_error("page", "all clients in every round", "participation=1"):
        check(method("page"), page_task(participation=0.5))
    with user_error("lr_min=0.2", "lr_max=0.1"):
        check(method("page", lr_min=0.2), page_task())
    with user_error("dcs_holdout", "only one"):
        hold_out_server(page_task(server=1).data, 0.5)
    data = make_federation((5, 5), server=5)
    splits = {**data.splits, "test": type(data.splits["test"]).of([np.arange(0), np.arange(3)])}
    with user_error("client_signal=test", "test samples at every client"):
        check(method("page", client_signal="test"), make_task((), federation=dataclasses.replace(data, splits=splits)))
    with user_error("page", "data at the server"):
        fedloom.run("page", "digits", rounds=1, server_share=0)
    check(method("page"), page_task())


# -- deviations -------------------------------------------------------------------------------------------------------


def test_deviations_repeat_the_next_round_with_one_action_shifted(tmp_path):
    settings = {"clients": 3, "rounds": 5, "plan": "stacked-eager", "lr_min": 0.05, "R_max": 1e9, **LEARNING_AGENTS}
    folder = tmp_path / "run"
    fedloom.run("page", "synthetic", out=folder, **settings)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    rows = fedloom.deviations(folder, size=0.2, tries=3).to_pylist()
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    on = fedloom.run("page", "synthetic", **{**settings, "rounds": 6, "replay": 5}).reports.to_pylist()
    rewards = {row["client"]: row["reward"] if row["client"] >= 0 else row["reward_CS"] for row in on[-4:]}
    assert [(r["client"], r["deviation"]) for r in rows] == [
        *[(i, what) for what in ("eta+0.2", "eta-0.2", "alpha+0.2", "alpha-0.2") for i in range(3)],
        *[(-1, f"p {j}") for j in (1, 2, 3)],
    ]
    for row in rows:  # without a deviation it is the round that a longer run would have had
        assert row["reward"] == pytest.approx(rewards[row["client"]], rel=1e-6)
        assert row["gain"] == row["deviating"] - row["reward"]
    gains = np.array([row["gain"] for row in rows])
    assert (gains[:6] != 0).all()
    assert (gains[-3:] != 0).all()
    assert (gains[3:6] < 0).all()  # a smaller step fits the training samples less well


def test_deviations_need_a_finished_run_with_agents(tmp_path):
    task = {"dataset": "synthetic", "clients": 3, "rounds": 1, "plan": "stacked-eager", "ep_max": 1}
    off = {"tune_p": False, "tune_eta": False, "tune_alpha": False}
    fedloom.run("fedavg", out=tmp_path / "other", **{k: v for k, v in task.items() if k != "ep_max"})
    fedloom.run("page", out=tmp_path / "off", **task, **off)
    with user_error("run of fedavg", "only page"):
        fedloom.deviations(tmp_path / "other")
    with user_error("No agent acts"):
        fedloom.deviations(tmp_path / "off")
    make_unfinished(tmp_path / "off")
    with user_error("is not finished"):
        fedloom.deviations(tmp_path / "off")
    with user_error("There is no run directory"):
        fedloom.deviations(tmp_path / "nowhere")
