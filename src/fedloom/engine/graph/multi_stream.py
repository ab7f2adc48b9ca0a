"""A graph on several CUDA streams: operations that do not depend on each other run concurrently.

A few clients of a small model leave most of a GPU idle, and their step takes as long as its chain of operations.
Captured from several streams, the chain is only as long as the dependencies demand: gradients of weights run beside the
backward pass, updates of parameters beside both.
"""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fedloom.engine.graph.analysis import is_view, written_by

STREAMS = 4
MAX_RESULT_BYTES = 1 << 31  # intermediate results are not freed: another stream may still read them


class Placement(NamedTuple):
    """Where an operation runs."""

    stream: int
    after: list[Node]  # operations on other streams that it must wait for


def assign_streams(graph: Graph, streams: int = STREAMS) -> dict[Node, Placement]:
    """A stream for every operation, and what it waits for: the operations whose results it reads, and those that read
    or write what it overwrites."""
    owner: dict[Node, Node] = {}  # the node whose memory a value is in
    writer: dict[Node, Node] = {}  # the last writer of memory
    readers: dict[Node, list[Node]] = {}  # readers of memory since its last write
    depth: dict[Node, int] = {}
    placed: dict[Node, Placement] = {}
    tails: list[Node | None] = [None] * streams
    # waited[s][r]: position in stream r up to which stream s has already waited
    waited: list[dict[int, int]] = [{} for _ in range(streams)]
    at: dict[Node, int] = {}  # position in its stream
    lengths = [0] * streams
    for node in graph.nodes:
        view = node.target is operator.getitem or (is_view(node) and not written_by(node))
        owner[node] = owner[node.all_input_nodes[0]] if view or written_by(node) else node
        if node.op != "call_function" or view:
            continue
        sources, targets = {owner[v] for v in node.all_input_nodes}, {owner[v] for v in written_by(node)}
        before = {writer[m] for m in sources if m in writer}
        before |= {reader for m in targets for reader in readers.get(m, [])}
        depth[node] = 1 + max((depth[v] for v in before), default=0)
        stream = min(range(streams), key=lambda k: _preference(tails[k], before, depth))
        after = []
        for other in sorted(before, key=lambda v: -at[v]):
            there = placed[other].stream
            if there != stream and waited[stream].get(there, -1) < at[other]:
                waited[stream][there] = at[other]
                after.append(other)
        placed[node], at[node], tails[stream] = Placement(stream, after), lengths[stream], node
        lengths[stream] += 1
        for memory in sources:
            readers.setdefault(memory, []).append(node)
        for memory in {*targets, node}:
            writer[memory], readers[memory] = node, []
    return placed


def _preference(tail: Node | None, before: set[Node], depth: dict[Node, int]) -> tuple[int, int]:
    """Smaller is better: behind the deepest operation that it waits for, else on the shortest stream."""
    if tail in before:
        return 0, -depth[tail]
    return 1, depth[tail] if tail is not None else 0


class MultiStreamGraph:
    """Runs a graph on several streams, which start from the current stream and are joined to it at the end."""

    def __init__(self, module: GraphModule) -> None:
        self.module, self.placed = module, assign_streams(module.graph)
        self.awaited = {node for placed in self.placed.values() for node in placed.after}
        # the first stream has the longest chain, so it gets priority
        self.streams = [torch.cuda.Stream(priority=-1 if k == 0 else 0) for k in range(STREAMS)]

    def __call__(self, *inputs: Tensor) -> None:
        main, streams, done = torch.cuda.current_stream(), self.streams, dict[Node, torch.cuda.Event]()
        for stream in streams:
            stream.wait_stream(main)
        for node, run in node_calls(self.module, inputs):
            if node not in self.placed:
                run()
                continue
            k, after = self.placed[node]
            with torch.cuda.stream(streams[k]):
                for other in after:
                    streams[k].wait_event(done[other])
                run()
                if node in self.awaited:
                    done[node] = streams[k].record_event()
        for stream in streams:
            main.wait_stream(stream)


def node_calls(module: GraphModule, inputs: tuple[Tensor, ...]) -> Iterator[tuple[Node, Any]]:
    """Yields the operations in order, with a function that carries each out and must be called before the next one."""
    values: dict[Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "call_function":

            def run(node: Node = node) -> None:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]

            yield node, run
