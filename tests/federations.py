"""Federations in one process for tests: a server, and sites that it reaches by messages only."""

from dataclasses import replace

import numpy as np
import torch
from helpers import make_federation, make_task, method

from fedloom.core.keys import root
from fedloom.core.tree import leaves
from fedloom.deployment.links import InProcess
from fedloom.deployment.remote import RemoteClients
from fedloom.deployment.site import Site
from fedloom.engine.clients import initial_state
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation

SEED = 3
SIZES = (7, 12, 21)
SETTINGS = {  # to be fast
    "dap-fl": {"ep_max": 2},
    "page": {"ep_max": 2},
    "fedrecon": {"query_epochs": 2},
    "fedala": {"start_epochs": 3},
}


def plain(tree):
    """The tree's values, comparable to the bit."""
    arrays = [v.numpy() if isinstance(v, torch.Tensor) else v for v in leaves(tree)]
    return [(v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in arrays]


class Federated:
    """A run on a federation, and the same run in one process (`simulation`)."""

    def __init__(self, name, folder, *, sizes=SIZES, participation=None, settings=None, wrap=None, **options):
        self.alg = method(name, **{**SETTINGS.get(name, {}), **(settings or {})})
        least = self.alg.min_samples(make_task((1,)))
        data = make_federation([max(n, least) for n in sizes], server=20)
        share = participation if participation is not None and self.alg.partial else 1.0
        task_options = {"participation": share, "batch_size": 5}
        model_options = {k: options.pop(k) for k in ("norm", "dropout", "privacy") if k in options}
        self.task = make_task((), federation=data, **task_options, **model_options)
        self.folder, self.options, self.wrap = folder, options, wrap or (lambda sites: InProcess(sites))
        self.simulation = Simulation(self.alg, self.task, SEED)
        self.sites = {i: self.site(i) for i in range(len(sizes))}
        self.server = self.new_server()

    def site(self, i):
        """The site of a client, as it is after a start."""
        task = replace(self.task, data=self.task.data.only([i]))
        server = self.alg.init_server(task, root(SEED, "init"))
        initial = initial_state(self.alg, task, SEED, server)
        return Site(i, self.alg, task, SEED, initial, self.folder / f"site-{i}", "run")

    def new_server(self):
        """A server as it is after a start."""
        task = replace(self.task, data=self.task.data.without_samples())
        self.link = self.wrap(self.sites)
        remote = RemoteClients(self.alg, task, SEED, "run", self.link, **self.options)
        return Simulation(self.alg, task, SEED, clients=remote)

    def restart(self):
        """Stop all sites and start them again."""
        self.sites.update({i: self.site(i) for i in self.sites})

    def compare(self, rounds=3, restart=False):
        """Both runs give the same bytes."""
        for _ in range(rounds):
            if restart:
                self.restart()
            same_round(advance(self.server), advance(self.simulation))
        self.same_state()

    def same_state(self):
        """Server and sites have the state that the simulation has."""
        assert plain(self.server.server) == plain(self.simulation.server)
        assert plain(self.server.driver.post) == plain(self.simulation.driver.post)
        for i, site in self.sites.items():
            ids = np.array([i])
            site.store.open(int(self.server.store.of(ids)[0]))
            assert site.store.trained[i] == self.simulation.store.trained[i]
            assert plain(site.store.read(ids)) == plain(self.simulation.store.read(ids))


def advance(run, **options):
    """A round of a run, which is trained by the reference engine."""
    (done,) = RunGroup([run], REFERENCE).advance(**options)
    return done


def variants():
    """Methods with settings that change what is sent."""
    return [
        ("moon", {"proj": 4}),
        ("lg-fedavg", {"pretrain_rounds": 2}),
        ("page", {"server_reward": "weighted_local", "ep_max": 2}),
        ("fedrod", {"personal_head": "hyper"}),
        ("feddyn", {"adaptive": True}),
        ("pfedkt", {"case": "C"}),
        ("hypcluster", {"Kc": 3}),
        ("fedphp", {"transfer": "kd"}),
        ("fedrecon", {"stateful": True, "query_epochs": 2}),
    ]


def same_round(found, expected):
    """Two rounds have the same cohort, scores and costs."""
    assert found.cohort.tolist() == expected.cohort.tolist()
    for name in ("t", "bytes_down", "bytes_up", "gradients", "samples", "participation"):
        assert getattr(found, name) == getattr(expected, name), name
    assert plain(found.scores) == plain(expected.scores)
    assert found.scores.keys() == expected.scores.keys()
