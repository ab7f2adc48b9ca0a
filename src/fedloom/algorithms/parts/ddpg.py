"""DDPG: an agent that learns, from remembered transitions, a policy for continuous actions in [-1, 1].

Lillicrap, Hunt, Pritzel, Heess, Erez, Tassa, Silver, Wierstra. Continuous Control with Deep Reinforcement Learning.
ICLR 2016. Networks, their initial values and the noise are PAGE's.

Every function is written for ONE agent, from state to state: plain for a server, under `vmap` for all clients together.
What depends on the round is computed on both sides of the condition and chosen by `where`. A network is one vector, so
that an update is a few operations, whatever the layers.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithms.parts import adam
from fedloom.core.autodiff import grad
from fedloom.core.keys import bits, fold, normal, uniform
from fedloom.core.tree import Tree, take, tree_map, where

HIDDEN = (40, 30)
Sizes = tuple[tuple[int, int], ...]  # inputs and outputs of each layer
LAST = torch.iinfo(torch.int64).max  # sorts behind everything


@dataclass(frozen=True)
class DDPG:
    """An agent as pure functions of its state; its fields are sizes and hyper-parameters."""

    states: int  # d_s
    actions: int  # d_a
    capacity: int  # transitions that are remembered
    critic_lr: float
    actor_lr: float
    tau: float  # share of the new networks that the targets take over
    gamma: float = 0.99  # discount
    batch: int = 32  # transitions in an update
    t_warm: int = 35  # up to this round actions are random and nothing is learnt
    noise: float = 1.0  # scale of the exploration noise at the first decision
    fade: int | None = 500  # decisions after which the noise has gone; none: it stays
    ou_theta: float = 0.15
    ou_sigma: float = 0.2
    ou_dt: float = 0.01

    @property
    def actor(self) -> Sizes:
        return (self.states, HIDDEN[0]), HIDDEN, (HIDDEN[1], self.actions)

    @property
    def critic(self) -> Sizes:
        """Layer sizes of the critic; the action is concatenated to the output of the first layer."""
        return (self.states, HIDDEN[0]), (HIDDEN[0] + self.actions, HIDDEN[1]), (HIDDEN[1], 1)

    def policy(self, net: Tensor, s: Tensor) -> Tensor:
        """mu(s)"""
        one, two, three = layers(net, self.actor)
        return torch.tanh(F.linear(F.relu(F.linear(F.relu(F.linear(s, *one)), *two)), *three))

    def value(self, net: Tensor, s: Tensor, a: Tensor) -> Tensor:
        """Q(s, a)"""
        one, two, three = layers(net, self.critic)
        h = torch.cat([F.relu(F.linear(s, *one)), a], -1)
        return F.linear(F.relu(F.linear(h, *two)), *three).squeeze(-1)

    def init(self, key: Tensor, dtype: torch.dtype) -> Tree:
        d_s, d_a = self.states, self.actions
        nets = {
            "actor": _network(fold(key, 0), self.actor, dtype),
            "critic": _network(fold(key, 1), self.critic, dtype),
        }
        zero = torch.zeros((), dtype=dtype, device=key.device)
        count = torch.zeros((), dtype=torch.int64, device=key.device)
        last = {"s": zero.expand(d_s), "a": zero.expand(d_a), "r": zero}  # the last decision and what it brought
        agent = {
            "nets": nets,
            "targets": nets,
            "adam": {name: adam.start(net) for name, net in nets.items()},
            "updates": count,
            "replay": tree_map(lambda v: v.expand(self.capacity, *v.shape), {**last, "next": last["s"]}),
            "stored": count,
            "noise": last["a"],
            "decisions": count,
            "last": last,
        }
        return tree_map(torch.clone, agent)

    def decide(self, agent: Tree, s: Tensor, t: Tensor, key: Tensor, first: Tensor) -> tuple[Tree, Tensor]:
        """A round of the agent: remember what the last decision led to, learn, act on the new state. The reward of this
        decision is told afterwards (`rewarded`)."""
        agent = self.remember(agent, s, ~first)
        agent = self.update(agent, fold(key, 0), t > self.t_warm)
        return self.act(agent, s, fold(key, 1), t <= self.t_warm)

    def remember(self, agent: Tree, s: Tensor, wanted: Tensor) -> Tree:
        """Store (last state, last action, its reward, s), over the oldest transition once the buffer is full."""
        slot = torch.arange(self.capacity, device=s.device)
        here = (slot == agent["stored"] % self.capacity) & wanted

        def put(old: Tensor, new: Tensor) -> Tensor:
            return torch.where(here.view(-1, *[1] * new.dim()), new, old)

        replay = tree_map(put, agent["replay"], {**agent["last"], "next": s})
        return {**agent, "replay": replay, "stored": agent["stored"] + wanted}

    def sample(self, agent: Tree, key: Tensor) -> Tensor:
        """Slots of a batch of transitions, uniformly and without replacement."""
        slot = torch.arange(self.capacity, device=key.device)
        order = torch.where(slot < agent["stored"], bits(key, slot), LAST)
        return torch.argsort(order, stable=True)[: self.batch]

    def update(self, agent: Tree, key: Tensor, wanted: Tensor) -> Tree:
        """One step of the critic, of the actor and of the targets, if there are enough transitions for a batch."""
        if self.capacity < self.batch:
            return agent
        t = take(agent["replay"], self.sample(agent, key))
        nets, old, state, k = agent["nets"], agent["targets"], agent["adam"], agent["updates"] + 1
        y = t["r"] + self.gamma * self.value(old["critic"], t["next"], self.policy(old["actor"], t["next"]))

        def error(net: Tensor) -> tuple[Tensor, Tree]:
            return ((self.value(net, t["s"], t["a"]) - y) ** 2).mean(), {}

        g, _ = grad(error, nets["critic"])
        critic, critic_adam = adam.step(nets["critic"], g, state["critic"], k, self.critic_lr)

        def loss(net: Tensor) -> tuple[Tensor, Tree]:
            return -self.value(critic, t["s"], self.policy(net, t["s"])).mean(), {}

        g, _ = grad(loss, nets["actor"])
        actor, actor_adam = adam.step(nets["actor"], g, state["actor"], k, self.actor_lr)
        nets = {"actor": actor, "critic": critic}
        new = {
            "nets": nets,
            "targets": tree_map(lambda theta, slow: self.tau * theta + (1 - self.tau) * slow, nets, old),
            "adam": {"actor": actor_adam, "critic": critic_adam},
            "updates": k,
        }
        ready = wanted & (agent["stored"] >= self.batch)
        return {**agent, **where(ready, new, {name: agent[name] for name in new})}

    def act(self, agent: Tree, s: Tensor, key: Tensor, random: Tensor) -> tuple[Tree, Tensor]:
        """An action at random, or the policy's with Ornstein-Uhlenbeck noise, which moves on with every decision."""
        old = agent["noise"]
        drawn = 2 * uniform(fold(key, 0), (self.actions,), s.dtype) - 1
        chosen = self.policy(agent["nets"]["actor"], s)
        if self.noise:
            step = self.ou_sigma * math.sqrt(self.ou_dt) * normal(fold(key, 1), (self.actions,), s.dtype)
            x = old - self.ou_theta * self.ou_dt * old + step  # mu = 0
            left = 1.0 if self.fade is None else (1 - agent["decisions"].to(s.dtype) / self.fade).clamp(min=0)
            chosen = (chosen + self.noise * left * x).clamp(-1, 1)
            agent = {**agent, "noise": torch.where(random, old, x)}
        a = torch.where(random, drawn, chosen)
        last = {"s": s, "a": a, "r": torch.zeros_like(agent["last"]["r"])}
        return {**agent, "decisions": agent["decisions"] + ~random, "last": last}, a

    def rewarded(self, agent: Tree, r: Tensor) -> Tree:
        """The reward of the last decision."""
        return {**agent, "last": {**agent["last"], "r": r}}


def layers(net: Tensor, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """(weight, bias) of each layer of a network that is kept as one vector."""
    parts = iter(net.split([n for inputs, outputs in sizes for n in (inputs * outputs, outputs)]))
    return [(next(parts).view(outputs, inputs), next(parts)) for inputs, outputs in sizes]


def _network(key: Tensor, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """Weights within 1/sqrt(outputs), those of the last layer within 0.003; biases as PyTorch draws them, within
    1/sqrt(inputs)."""

    def within(limit: float, key: Tensor, count: int) -> Tensor:
        return limit * (2 * uniform(key, (count,), dtype) - 1)

    drawn = []
    for j, (inputs, outputs) in enumerate(sizes):
        limit = 0.003 if j == len(sizes) - 1 else 1 / math.sqrt(outputs)
        drawn.append(within(limit, fold(key, 2 * j), inputs * outputs))
        drawn.append(within(1 / math.sqrt(inputs), fold(key, 2 * j + 1), outputs))
    return torch.cat(drawn)
