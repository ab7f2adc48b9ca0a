"""Dap-FL: rewards, actions, what agents remember, identities, and a second implementation."""

import dataclasses

import numpy as np
import pytest
from helpers import EAGER, RAGGED, client_state, make_federation, make_task, method, run_rounds, tensor
from oracles import (
    LEARNING_AGENTS,
    UniformFedAvg,
    assert_near,
    assert_same_scores,
    assert_scores,
    average,
    full_batch_run,
    measure,
)
from sentences import user_error

from fedloom.algorithms.dap_fl import gain
from fedloom.core.federation import Ragged
from fedloom.core.tree import size_bytes, take
from fedloom.studies.build import check

SIZES = (3, 17, 8, 11)


def test_dap_fls_reward_is_the_gain_of_accuracy_plus_the_fall_of_loss():
    """(0.7 - 0.5) + (1.2 - 0.9) = 0.5; the other way round -0.5."""
    assert float(gain(tensor([0.5, 1.2]), tensor([0.7, 0.9]))) == pytest.approx(0.5)
    assert float(gain(tensor([0.7, 0.9]), tensor([0.5, 1.2]))) == pytest.approx(-0.5)


def test_dap_fls_agents_are_those_of_the_specification():
    agent = method("dap-fl").client_agent(make_task(SIZES, rounds=7))
    assert (agent.states, agent.actions, agent.capacity) == (2, 2, 7)
    assert (agent.critic_lr, agent.actor_lr, agent.tau) == (0.001, 0.0001, 0.001)
    assert (agent.t_warm, agent.batch, agent.gamma) == (35, 32, 0.99)
    assert (agent.noise, agent.fade) == (1.0, None)  # exploration stays


@pytest.mark.parametrize(
    ("a", "eta", "alpha"), [((-1, -1), 0.01, 1), ((0, 0), 0.105, 11), ((1, 1), 0.2, 20), ((0.5, -0.5), 0.1525, 6)]
)
def test_dap_fl_decodes_actions_as_page_does(a, eta, alpha):
    found = method("dap-fl", lr_min=0.01, lr_max=0.2).decoded(tensor(a))
    assert (float(found[0]), int(found[1])) == (pytest.approx(eta), alpha)


@pytest.mark.parametrize("compat", [False, True])
def test_dap_fl_without_a_choice_is_fedavg(compat):
    """One learning rate, one epoch; compat weighs clients equally."""
    task = make_task(RAGGED, lr=0.07, participation=0.5, momentum=0.5)
    alg = method("dap-fl", lr_min=0.07, lr_max=0.07, ep_max=1, local_clip=None, compat=compat)
    run, records = run_rounds(alg, task, evaluate=True)
    fedavg, expected = run_rounds(UniformFedAvg() if compat else method("fedavg"), task, evaluate=True)
    assert_near(run.server["w"], fedavg.server["w"])
    assert_same_scores(records, expected)


@pytest.mark.parametrize("compat", [False, True])
def test_dap_fl_against_plain_pytorch_given_the_actions(compat):
    """State, training, reward and average, in rounds in which agents learn (from the third on); the transitions that
    they remember are (s(t-1), a(t-1), r(t-1), s(t))."""
    run, plain = full_batch_run(method("dap-fl", local_clip=0.3, compat=compat, **LEARNING_AGENTS))
    w, states, rewards, measured = plain.initial, [], [], []
    for t in range(6):
        done = run.advance()
        found = done.reports
        states.append([measure(w, plain.train[i]) for i in plain.clients])
        assert found["acc"] == pytest.approx([s[0] for s in states[t]])
        assert found["loss"] == pytest.approx([s[1] for s in states[t]])
        trained = [
            plain.fit(w, plain.train[i], epochs=int(found["alpha"][i]), lr=float(found["eta"][i]), clip=0.3)
            for i in plain.clients
        ]
        if compat:  # accuracy before, test loss after training; against the round before
            measured.append([(states[t][i][0], measure(trained[i], plain.test[i])[1]) for i in plain.clients])
        else:
            measured.append(states[t])
        gained = [
            measured[t][i][0] - measured[t - 1][i][0] + measured[t - 1][i][1] - measured[t][i][1] if t else 0
            for i in plain.clients
        ]
        assert found["reward"] == pytest.approx(gained, abs=1e-9)
        rewards.append(gained)
        w = average(trained, [1] * 4 if compat else plain.sizes)
        assert_near(run.server["w"], w, 1e-9)
        assert_scores(done.scores["post"]["test"], trained, plain.test)
        assert_scores(done.scores["pre"]["test"], [w] * len(SIZES), plain.test)
    agents = client_state(run, "agent")
    assert agents["stored"].tolist() == [5] * len(SIZES)
    assert agents["updates"].tolist() == [4] * len(SIZES)
    for i in plain.clients:
        replay = take(agents["replay"], i)
        for t in range(5):
            assert replay["s"][t].tolist() == pytest.approx(states[t][i])
            assert replay["next"][t].tolist() == pytest.approx(states[t + 1][i])
            # what round t was good for is known in round t + 1, or with compat at its own end
            assert float(replay["r"][t]) == pytest.approx(rewards[t if compat else t + 1][i], abs=1e-9)


def test_dap_fl_counts_from_one_participation_to_the_next():
    """Client 2 takes part in rounds 0 and 3: its one transition spans them, and its reward compares their models."""
    run, plain = full_batch_run(method("dap-fl", ep_max=2), plan=EAGER)
    before = measure(plain.initial, plain.train[2])
    for cohort in ([0, 2], [0, 1], [1, 3]):
        run.advance(evaluate=False, cohort=np.array(cohort))
    after = measure(run.server["w"], plain.train[2])
    done = run.advance(evaluate=False, cohort=np.array([2]))
    assert client_state(run, "agent")["stored"].tolist() == [1, 1, 1, 0]
    gained = after[0] - before[0] + before[1] - after[1]
    assert done.reports["reward"].tolist() == pytest.approx([gained])
    assert float(client_state(run, "agent")["replay"]["r"][2, 0]) == pytest.approx(gained)


def test_dap_fls_agents_stay_with_their_clients_and_differ():
    run, records = run_rounds(method("dap-fl"), make_task(SIZES), evaluate=True, rounds=1)
    model = size_bytes(run.server["w"])
    assert (records[0].bytes_down, records[0].bytes_up) == (4 * model, 4 * model)
    first = client_state(run, "agent")["nets"]["actor"]
    assert len({tuple(v.flatten().tolist()) for v in first}) == len(SIZES)


def test_dap_fl_refuses_what_does_not_fit():
    with user_error("lr_min=0.2", "lr_max=0.1"):
        check(method("dap-fl", lr_min=0.2), make_task(SIZES))
    data = make_federation((5, 5))
    splits = {**data.splits, "test": Ragged.of([np.arange(0), np.arange(3)])}
    task = make_task((), federation=dataclasses.replace(data, splits=splits))
    with user_error("dap-fl", "compat=true", "test samples"):
        check(method("dap-fl", compat=True), task)
    check(method("dap-fl"), task)
