"""Clients in parallel on a CPU: each worker is a thread that computes with one intra-op thread.

Small operations gain little from several intra-op threads, and clients do not depend on each other. Results are the
same to the bit for any number of workers.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


class _Stopped(Exception):
    pass


class _Worker(threading.local):
    stop: threading.Event | None = None  # set when this worker is to give up


_worker = _Worker()


def raise_if_stopped() -> None:
    """Called inside long loops: ends the work of a client when another worker failed or the user pressed Ctrl-C."""
    if _worker.stop is not None and _worker.stop.is_set():
        raise _Stopped


def run_in_threads(function: Callable[[int], T], order: Iterable[int], workers: int) -> list[T]:
    """function(j) for every j in `order`; returns the results by ascending j. The first error stops all workers and is
    raised."""
    todo, results, errors = deque(order), dict[int, T](), list[BaseException]()
    stop, threads = threading.Event(), torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(1)
        _worker.stop = stop
        try:
            with torch.no_grad():
                while (j := _next(todo)) is not None:
                    results[j] = function(j)
                    raise_if_stopped()
        except _Stopped:
            pass
        except BaseException as error:  # raised again below, in the calling thread
            errors.append(error)
            stop.set()

    pool = [threading.Thread(target=work, name=f"fedloom-{k}") for k in range(workers)]
    try:
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
    finally:  # Ctrl-C arrives in the calling thread
        stop.set()
        for thread in pool:
            if thread.is_alive():
                thread.join()
        torch.set_num_threads(threads)  # the default of threads that start later; the calling thread kept its number
    if errors:
        raise errors[0]
    return [results[j] for j in sorted(results)]


def _next(todo: deque[int]) -> int | None:
    try:
        return todo.popleft()
    except IndexError:  # another worker took the last one
        return None
