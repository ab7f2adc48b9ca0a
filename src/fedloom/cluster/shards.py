"""Shards: parts of the clients that are computed by themselves, so that results do not depend on who computes them."""

import numpy as np

USUAL = 8


def usual_number(clients: int, actors: int) -> int:
    """The number of shards of a new run: the same for all numbers of actors up to `USUAL`."""
    return max(min(USUAL, clients), actors)


def shard_of_clients(sizes: np.ndarray, clients: int, shards: int) -> np.ndarray:
    """The shard of every client; `clients` take part, and those behind them are held out.

    They are dealt out by their number of samples, and every other time the other way round, so that all shards take
    about as long.
    """
    found = np.empty(len(sizes), np.int64)
    turns = np.concatenate([np.arange(shards), np.arange(shards)[::-1]])
    for group in (np.arange(clients), np.arange(clients, len(sizes))):
        found[group[np.argsort(-sizes[group], kind="stable")]] = np.resize(turns, len(group))
    return found


def shards_of_actors(shards: int, actors: int) -> list[list[int]]:
    """The shards of every actor."""
    return [some.tolist() for some in np.array_split(np.arange(shards), actors)]
