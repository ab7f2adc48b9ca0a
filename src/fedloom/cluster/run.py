"""What `engine=ray` means for a run: whether it can be had, how many actors and shards there are."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial

import torch

from fedloom.cluster.actors import RayActors, pickled, require_ray, usual_number
from fedloom.cluster.clients import ShardedClients
from fedloom.cluster.shards import USUAL
from fedloom.cluster.shards import usual_number as usual_shards
from fedloom.config.settings import Settings
from fedloom.core.errors import UserError
from fedloom.engine.clients import Clients, LocalClients
from fedloom.engine.plan import Plan


def check(s: Settings, clients: int) -> None:
    """Raise UserError if the settings ask for what the Ray engine cannot do."""
    if s.engine != "ray":
        if s.actors is not None:
            raise UserError(f"actors={s.actors} belongs to engine=ray, but engine is {s.engine}; set engine=ray.")
        return
    if importlib.util.find_spec("ray") is None:
        require_ray()  # raises UserError
    if s.actors is not None and s.actors > clients:
        raise UserError(f"actors={s.actors} is more than the {clients} clients; use actors={clients} or fewer.")
    if s.store == "disk":
        raise UserError("engine=ray keeps the clients' state in the memory of the actors; set store=memory.")
    if s.device.startswith("cuda:"):
        raise UserError(f"engine=ray takes the GPUs that Ray gives it, and not {s.device}; set device=cuda.")


def threads(s: Settings) -> int:
    """Threads of a process on a CPU, by all of which the last bits of results change: one, or OMP_NUM_THREADS. 0 for
    other engines, which take what torch has."""
    if s.engine != "ray":
        return 0
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else 1


def maker(s: Settings, clients: int, device: torch.device, plan: Plan | None) -> Callable[..., LocalClients]:
    """What makes the clients of a run, of which `clients` take part; `plan` is that of an earlier start."""
    if s.engine != "ray":
        return LocalClients
    on_gpus = device.type == "cuda"
    known = plan.shards if plan is not None else None
    actors = s.actors or min(usual_number(on_gpus), clients, known or USUAL)
    shards = known or usual_shards(clients, actors)
    if actors > shards:
        raise UserError(
            f"actors={actors} is more than the {shards} shards that this run was started with; use actors={shards} or "
            "fewer."
        )
    return partial(
        ShardedClients,
        actors=RayActors(actors, on_gpus),
        shards=shards,
        pickled=pickled,
        threads=plan.threads if plan is not None else threads(s),
        deterministic=s.deterministic,
        precision=s.dtype,
    )


def at_home(clients: Clients) -> Clients:
    """The clients of a run that is finished, which need no actors any more."""
    return clients.at_home() if isinstance(clients, ShardedClients) else clients
