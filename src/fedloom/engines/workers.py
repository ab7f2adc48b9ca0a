"""Clients side by side: each worker is a thread that computes with one thread of the processor.

Small operations gain little from several threads inside them, and clients do not depend on each other. Results are the
same to the bit for any number of workers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


class _Stopped(Exception):
    pass


class _Here(threading.local):
    stop: threading.Event | None = None  # set when this worker is to give up


_here = _Here()


def proceed() -> None:
    """For long loops: ends the work of a client whose result nobody waits for any more."""
    if _here.stop is not None and _here.stop.is_set():
        raise _Stopped


def side_by_side(job: Callable[[int], T], order: Iterable[int], workers: int) -> list[T]:
    """job(j) for every j in `order`, the results by ascending j. The first error stops all workers and is raised."""
    todo, found, errors = deque(order), dict[int, T](), list[BaseException]()
    stop, threads = threading.Event(), torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(1)
        _here.stop = stop
        try:
            with torch.no_grad():
                while (j := _next(todo)) is not None:
                    found[j] = job(j)
                    proceed()
        except _Stopped:
            pass
        except BaseException as error:  # raised where the result is waited for
            errors.append(error)
            stop.set()

    crew = [threading.Thread(target=work, name=f"fedloom-{k}") for k in range(workers)]
    try:
        for one in crew:
            one.start()
        for one in crew:
            one.join()
    finally:  # Ctrl-C arrives in this thread
        stop.set()
        for one in crew:
            if one.is_alive():
                one.join()
        torch.set_num_threads(threads)  # of threads that are yet to come; this one kept its number
    if errors:
        raise errors[0]
    return [found[j] for j in sorted(found)]


def _next(todo: deque[int]) -> int | None:
    try:
        return todo.popleft()
    except IndexError:  # another worker took the last one
        return None
