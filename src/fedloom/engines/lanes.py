"""A program in lanes: operations that need not wait for each other go side by side.

A few clients of a small model leave most of a GPU idle, and their step takes as long as its chain of operations.
Captured from several streams, the chain is only as long as it must be: weights' gradients go beside the gradient on its
way back, steps on parameters beside both.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fedloom.engines.trace import is_view

LANES = 4
MOST_BYTES = 1 << 31  # of results on the way, which all stay: another lane may still read what one is done with


class Placed(NamedTuple):
    lane: int
    after: list[Node]  # operations of other lanes that must be done before


def place(graph: Graph, lanes: int = LANES) -> dict[Node, Placed]:
    """A lane for every operation that works on the device, and what it waits for: those whose results it reads, and
    those that read or write what it writes over."""
    owner: dict[Node, Node] = {}  # whose memory a value lies in
    writer: dict[Node, Node] = {}  # of memory, the last
    readers: dict[Node, list[Node]] = {}  # since then
    depth: dict[Node, int] = {}
    place: dict[Node, Placed] = {}
    tails: list[Node | None] = [None] * lanes
    seen: list[dict[int, int]] = [{} for _ in range(lanes)]  # by lane: how far it has waited for each other one
    at: dict[Node, int] = {}  # how many came before in its lane
    lengths = [0] * lanes
    for node in graph.nodes:
        shows = node.target is operator.getitem or (is_view(node) and not _writes(node))
        owner[node] = owner[node.all_input_nodes[0]] if shows or _writes(node) else node
        if node.op != "call_function" or shows:
            continue
        sources, targets = {owner[v] for v in node.all_input_nodes}, {owner[v] for v in _writes(node)}
        before = {writer[m] for m in sources if m in writer}
        before |= {reader for m in targets for reader in readers.get(m, [])}
        depth[node] = 1 + max((depth[v] for v in before), default=0)
        lane = min(range(lanes), key=lambda k: _preference(tails[k], before, depth))
        after = []
        for other in sorted(before, key=lambda v: -at[v]):
            there = place[other].lane
            if there != lane and seen[lane].get(there, -1) < at[other]:
                seen[lane][there] = at[other]
                after.append(other)
        place[node], at[node], tails[lane] = Placed(lane, after), lengths[lane], node
        lengths[lane] += 1
        for memory in sources:
            readers.setdefault(memory, []).append(node)
        for memory in {*targets, node}:
            writer[memory], readers[memory] = node, []
    return place


def _preference(tail: Node | None, before: set[Node], depth: dict[Node, int]) -> tuple[int, int]:
    """Best behind the deepest of those that it waits for, else where least is waiting."""
    if tail in before:
        return 0, -depth[tail]
    return 1, depth[tail] if tail is not None else 0


def _writes(node: Node) -> list[Node]:
    """What an operation writes over."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    over = [
        given.get(a.name) for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return [
        v for values in over for v in (values if isinstance(values, list | tuple) else [values]) if isinstance(v, Node)
    ]


def bytes_on_the_way(graph: Graph) -> int:
    """Of all results together."""
    made = (n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem and not is_view(n))
    values = (node.meta.get("val") for node in made)
    flat = (v for value in values for v in (value if isinstance(value, list | tuple) else [value]))
    return sum(v.numel() * v.element_size() for v in flat if isinstance(v, Tensor))


class Lanes:
    """Runs a program on several streams, from where the current one is to where it goes on."""

    def __init__(self, program: GraphModule) -> None:
        self.program, self.placed = program, place(program.graph)
        self.awaited = {node for placed in self.placed.values() for node in placed.after}
        # what comes first is where others wait for most, so a GPU is to take it first
        self.streams = [torch.cuda.Stream(priority=-1 if lane == 0 else 0) for lane in range(LANES)]

    def __call__(self, *inputs: Tensor) -> None:
        main, streams, done = torch.cuda.current_stream(), self.streams, dict[Node, torch.cuda.Event]()
        for stream in streams:
            stream.wait_stream(main)
        for node, run in operations(self.program, inputs):
            if node not in self.placed:
                run()
                continue
            lane, after = self.placed[node]
            with torch.cuda.stream(streams[lane]):
                for other in after:
                    streams[lane].wait_event(done[other])
                run()
                if node in self.awaited:
                    done[node] = streams[lane].record_event()
        for stream in streams:
            main.wait_stream(stream)


def operations(program: GraphModule, inputs: tuple[Tensor, ...]) -> Iterator[tuple[Node, Any]]:
    """The operations of a program in their order, each to be carried out before the next is asked for."""
    values: dict[Node, Any] = {}
    given = iter(inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(program, node.target)
        elif node.op == "call_function":

            def run(node: Node = node) -> None:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]

            yield node, run
