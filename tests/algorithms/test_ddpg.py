"""The DDPG agent: against plain PyTorch, with numbers by hand, and agents under vmap against one after another."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_equal, is_equal
from torch import nn

from fedloom.algorithms.parts.ddpg import DDPG, layers
from fedloom.core.autodiff import vmap
from fedloom.core.keys import fold, normal, root
from fedloom.core.tree import leaves, take, tree_map

YES, NO = torch.tensor(True), torch.tensor(False)


def key(*ids):
    return torch.tensor(fold(root(3, "ddpg"), *ids))


def make(states=2, actions=3, capacity=50, **more) -> DDPG:
    return DDPG(states, actions, capacity, **{"critic_lr": 0.05, "actor_lr": 0.01, "tau": 0.1, **more})


def new_agent(ddpg, *ids):
    return ddpg.init(key(*ids), torch.float64)


def filled(ddpg, count, seed=0):
    """An agent that lived through some decisions with random states and rewards."""
    draw = torch.Generator().manual_seed(seed)
    agent = new_agent(ddpg)
    for j in range(count + 1):
        s = torch.rand(ddpg.states, generator=draw, dtype=torch.float64)
        agent = ddpg.remember(agent, s, torch.tensor(j > 0))
        agent, _ = ddpg.act(agent, s, key(j), YES)
        agent = ddpg.rewarded(agent, 10 * torch.rand((), generator=draw, dtype=torch.float64))
    return agent


# -- networks ---------------------------------------------------------------------------------------------------------


def test_networks_have_the_sizes_and_initial_ranges_of_the_specification():
    ddpg = make(states=500, actions=400)
    agent = new_agent(ddpg)
    nets = {"actor": layers(agent["nets"]["actor"], ddpg.actor), "critic": layers(agent["nets"]["critic"], ddpg.critic)}
    shapes = {name: [tuple(w.shape) for w, _ in net] for name, net in nets.items()}
    assert shapes == {"actor": [(40, 500), (30, 40), (400, 30)], "critic": [(40, 500), (30, 440), (1, 30)]}
    for net in nets.values():
        for (w, b), limit in zip(net, (1 / math.sqrt(40), 1 / math.sqrt(30), 0.003), strict=True):
            assert 0.9 * limit < w.abs().max() <= limit
            assert b.abs().max() <= 1 / math.sqrt(w.shape[1])
            assert abs(w.mean()) < limit / 3
    assert_equal(agent["targets"], agent["nets"])
    assert all((v == 0).all() for v in leaves((agent["adam"], agent["replay"], agent["last"], agent["noise"])))
    assert not is_equal(new_agent(ddpg, 1)["nets"], agent["nets"])


def module(ddpg, agent, name):
    """The same network as a module of PyTorch."""
    critic = name == "critic"
    values = layers(agent["nets"][name], ddpg.critic if critic else ddpg.actor)
    linear = [nn.Linear(w.shape[1], w.shape[0], dtype=torch.float64) for w, _ in values]
    for layer, (w, b) in zip(linear, values, strict=True):
        layer.weight.data, layer.bias.data = w.clone(), b.clone()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(linear)

        def forward(self, s, a=None):
            one, two, three = self.layers
            h = F.relu(one(s))
            h = torch.cat([h, a], 1) if critic else h
            out = three(F.relu(two(h)))
            return out[:, 0] if critic else torch.tanh(out)

    return Net()


def params(net):
    """In the order in which an agent keeps them."""
    return torch.cat([p.detach().flatten() for layer in net.layers for p in (layer.weight, layer.bias)])


def test_updates_are_those_of_plain_pytorch():
    """Three updates, each on the batch that the key draws: critic, then actor on the new critic, then targets."""
    ddpg = make(batch=8, gamma=0.9, tau=0.3)
    agent = filled(ddpg, 20)
    nets = {name: module(ddpg, agent, name) for name in ("actor", "critic")}
    targets = {name: module(ddpg, agent, name) for name in ("actor", "critic")}
    adam = {
        "critic": torch.optim.Adam(nets["critic"].parameters(), lr=0.05),
        "actor": torch.optim.Adam(nets["actor"].parameters(), lr=0.01),
    }
    for k in range(3):
        t = take(agent["replay"], ddpg.sample(agent, key(100, k)))
        with torch.no_grad():
            y = t["r"] + 0.9 * targets["critic"](t["next"], targets["actor"](t["next"]))
        adam["critic"].zero_grad()
        F.mse_loss(nets["critic"](t["s"], t["a"]), y).backward()
        adam["critic"].step()
        adam["actor"].zero_grad()
        (-nets["critic"](t["s"], nets["actor"](t["s"])).mean()).backward()
        adam["actor"].step()
        for name, slow in targets.items():
            for old, new in zip(slow.parameters(), nets[name].parameters(), strict=True):
                old.data = 0.3 * new.data + 0.7 * old.data
        agent = ddpg.update(agent, key(100, k), YES)
        for name in nets:
            for found, expected in (("nets", nets), ("targets", targets)):
                torch.testing.assert_close(agent[found][name], params(expected[name]), rtol=1e-10, atol=1e-12)
    assert agent["updates"] == 3


def test_float32_keeps_adams_first_steps():
    """The first step of Adam is lr * sign(g), whatever the precision."""
    ddpg = make(batch=8)
    agent = tree_map(lambda v: v.float() if v.is_floating_point() else v, filled(ddpg, 20))
    new = ddpg.update(agent, key(1), YES)
    assert all(torch.isfinite(v).all() for v in leaves(new))
    moved = (agent["nets"]["critic"] - new["nets"]["critic"])[-1:].abs()  # the bias of its only output
    torch.testing.assert_close(moved, torch.full_like(moved, 0.05), rtol=1e-4, atol=0)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_transitions_are_remembered_in_order_and_the_oldest_are_overwritten():
    ddpg = make(states=1, actions=1, capacity=4)
    agent = new_agent(ddpg)
    made = []
    for j in range(7):
        s = torch.tensor([float(j)], dtype=torch.float64)
        agent = ddpg.remember(agent, s, torch.tensor(j > 0))
        agent, a = ddpg.act(agent, s, key(j), YES)
        agent = ddpg.rewarded(agent, torch.tensor(10.0 * j, dtype=torch.float64))
        made.append((float(j), float(a), 10.0 * j, j + 1.0))
        stored = [tuple(float(agent["replay"][k][slot]) for k in ("s", "a", "r", "next")) for slot in range(4)]
        if j <= 4:  # up to four transitions: in their order, the rest still empty
            assert stored == [*made[:j], *[(0.0, 0.0, 0.0, 0.0)] * (4 - j)]
    assert agent["stored"] == 6
    assert stored == [made[4], made[5], made[2], made[3]]


def test_nothing_is_remembered_if_it_is_not_wanted():
    ddpg = make()
    agent = filled(ddpg, 5)
    assert_equal(ddpg.remember(agent, torch.ones(2, dtype=torch.float64), NO), agent)


def test_a_batch_is_drawn_without_replacement_from_what_is_there_and_uniformly():
    ddpg = make(batch=8, capacity=50)
    agent = filled(ddpg, 12)
    counts = torch.zeros(50)
    for j in range(2000):
        slots = ddpg.sample(agent, key(j))
        assert len(set(slots.tolist())) == 8
        counts[slots] += 1
    assert (counts[12:] == 0).all()
    expected = 2000 * 8 / 12  # each with a standard deviation of sqrt(2000 * 2/3 * 1/3) = 21
    assert (counts[:12] - expected).abs().max() < 5 * 21
    full = filled(ddpg, 70)  # wrapped around: every slot may be drawn
    seen = {slot for j in range(300) for slot in ddpg.sample(full, key(j)).tolist()}
    assert seen == set(range(50))


# -- acting -----------------------------------------------------------------------------------------------------------


def test_actions_are_random_up_to_t_warm_and_then_the_policys():
    ddpg = make(t_warm=5, batch=2)
    agent = new_agent(ddpg)
    nets, drawn = agent["nets"], []
    s = torch.tensor([0.3, 0.6], dtype=torch.float64)
    for t in range(9):
        before = agent
        agent, a = ddpg.decide(agent, s, torch.tensor(t), key(t), torch.tensor(t == 0))
        agent = ddpg.rewarded(agent, torch.tensor(1.0, dtype=torch.float64))
        assert a.abs().max() <= 1
        if t <= 5:
            drawn.append(a)
            assert_equal(agent["nets"], nets)  # nothing is learnt
            assert_equal(agent["noise"], before["noise"])
            assert agent["decisions"] == agent["updates"] == 0
        else:
            assert agent["decisions"] == agent["updates"] == t - 5
            assert not is_equal(agent["nets"], nets)
    values = torch.stack(drawn).flatten()
    assert len(set(values.tolist())) == len(values)
    assert values.min() < -0.3
    assert values.max() > 0.3


def test_noise_follows_its_recursion_and_fades():
    """x = x + 0.15 (0 - x) 0.01 + 0.2 sqrt(0.01) N(0, 1); its share is 1, 2/3, 1/3, 0, 0."""
    ddpg = make(fade=3)
    agent = new_agent(ddpg)
    s = torch.tensor([0.3, 0.6], dtype=torch.float64)
    greedy = ddpg.policy(agent["nets"]["actor"], s)
    x = torch.zeros(3, dtype=torch.float64)
    for j, share in enumerate((1, 2 / 3, 1 / 3, 0, 0)):
        agent, a = ddpg.act(agent, s, key(j), NO)
        x = x + 0.15 * (0 - x) * 0.01 + 0.2 * math.sqrt(0.01) * normal(fold(key(j), 1), (3,), torch.float64)
        torch.testing.assert_close(agent["noise"], x, rtol=1e-12, atol=0)
        torch.testing.assert_close(a, (greedy + share * x).clamp(-1, 1), rtol=1e-12, atol=0)
    assert agent["decisions"] == 5


def test_noise_may_stay_or_be_absent():
    s = torch.tensor([0.3, 0.6], dtype=torch.float64)
    staying, absent = make(fade=None), make(noise=0.0)
    agent = {**new_agent(staying), "decisions": torch.tensor(10**6)}
    new, a = staying.act(agent, s, key(1), NO)
    greedy = staying.policy(agent["nets"]["actor"], s)
    torch.testing.assert_close(a, greedy + new["noise"])
    new, a = absent.act(agent, s, key(1), NO)
    assert torch.equal(a, greedy)
    assert_equal(new["noise"], agent["noise"])


def test_noisy_actions_stay_within_bounds():
    ddpg = make(ou_sigma=1000.0)
    agent = new_agent(ddpg)
    for j in range(20):
        agent, a = ddpg.act(agent, torch.zeros(2, dtype=torch.float64), key(j), NO)
        assert a.abs().max() <= 1


# -- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "wanted", "learns"), [(7, True, False), (8, False, False), (8, True, True)])
def test_an_update_needs_permission_and_a_full_batch(stored, wanted, learns):
    ddpg = make(batch=8)
    agent = filled(ddpg, stored)
    new = ddpg.update(agent, key(1), torch.tensor(wanted))
    assert is_equal(new, agent) != learns
    assert new["updates"] == learns


def test_a_memory_below_a_batch_never_learns():
    ddpg = make(capacity=10, batch=32)
    agent = filled(ddpg, 40)
    assert_equal(ddpg.update(agent, key(1), YES), agent)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_policy_moves_to_the_actions_that_pay(sign):
    """The reward is the action itself, or its negative, in every state."""
    ddpg = make(states=1, actions=1, capacity=150, critic_lr=0.01, actor_lr=0.002, gamma=0.0)
    agent = new_agent(ddpg)
    s = torch.tensor([0.5], dtype=torch.float64)
    assert abs(ddpg.policy(agent["nets"]["actor"], s)) < 0.2
    for t in range(150):
        agent, a = ddpg.decide(agent, s, torch.tensor(t), key(t), torch.tensor(t == 0))
        agent = ddpg.rewarded(agent, sign * a[0])
    assert sign * ddpg.policy(agent["nets"]["actor"], s) > 0.9
    torch.testing.assert_close(ddpg.value(agent["nets"]["critic"], s, a), sign * a[0], rtol=0.1, atol=0)


def test_agents_under_vmap_do_what_each_does_alone():
    """Eight rounds; agents differ in key, state, reward, and in when they begin."""
    ddpg = make(capacity=5, batch=2, t_warm=1)
    count = 4

    def begin(key):
        return ddpg.init(key, torch.float64)

    def turn(agent, s, t, key, first, r):
        agent, a = ddpg.decide(agent, s, t, key, first)
        return ddpg.rewarded(agent, r), a

    keys = torch.stack([key(i) for i in range(count)])
    stacked, alone = vmap(begin)(keys), [begin(k) for k in keys]
    draw = torch.Generator().manual_seed(0)
    for t in range(8):
        s = torch.rand(count, 2, generator=draw, dtype=torch.float64)
        r = torch.rand(count, generator=draw, dtype=torch.float64)
        first = torch.arange(count) >= t
        rest = (s, torch.full((count,), t), fold(keys, t), first, r)
        stacked, actions = vmap(turn)(stacked, *rest)
        for i in range(count):
            alone[i], a = turn(alone[i], *(v[i] for v in rest))
            torch.testing.assert_close(actions[i], a, rtol=1e-10, atol=1e-12)
    for i in range(count):
        for found, expected in zip(leaves(take(stacked, i)), leaves(alone[i]), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert stacked["updates"].tolist() == [6, 5, 4, 3]  # agent i has the two transitions of a batch in round i + 2
