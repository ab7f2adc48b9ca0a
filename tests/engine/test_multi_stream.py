"""Graphs on several streams: every order of operations that the streams allow gives the same result."""

import random

import numpy as np
import pytest
import torch
from helpers import SingleRun, method, model_task

from fedloom.core.tree import tree_flatten
from fedloom.engine import batching
from fedloom.engine.graph.in_place import write_to_inputs
from fedloom.engine.graph.multi_stream import Placement, assign_streams, node_calls
from fedloom.engine.graph.stacked_step import StackedStep, flat_inputs
from fedloom.engine.graph.tracing import trace
from fedloom.engine.plan import Plan


def step_graph(alg, model, shape):
    """The graph of a step of two clients that overwrites their state, and its inputs."""
    task = model_task(model, shape, sizes=(6, 6))
    plan = Plan("stacked", "eager", chunk=2, convolutions={})
    run = SingleRun(method(alg), task, 0, plan=plan)
    cohort = run.cohort(np.arange(2), 0)
    with torch.no_grad():
        work, phase = run.executor.begin(cohort), method(alg).phases(task)[0]
        window = batching.for_cohort(task, phase, cohort, 1).window(task, np.arange(2), 0, 1)
        rows, shared = flat_inputs(cohort)
        inputs = [*(v[0] for v in window), torch.zeros(1, dtype=torch.int64), *tree_flatten(work)[0], *rows, *shared]
        step = StackedStep(task, phase, work, cohort, plan)

        def counted(*flat):
            return step(*flat[:6], *flat[7:])

        inputs = [v.clone() for v in (*inputs, task.data.x, task.data.y)]
        graph = trace(counted, inputs)
        write_to_inputs(graph, 7, 6)
    return graph, inputs


def run_in_some_order(module, placed, inputs, draw):
    """The inputs after the graph ran on streams of random speed, which wait only for what `placed` says."""
    inputs = [v.clone() for v in inputs]
    values = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))

    def value(node):
        if node.op == "get_attr":
            return getattr(module, node.target)
        if node not in values and node in placed:
            raise LookupError(f"{node} is read before it is computed")
        return values[node] if node in values else result(node)  # views are not placed

    def result(node):
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
        return node.target(*args, **kwargs)

    queues = {}
    for node, (stream, after) in placed.items():
        queues.setdefault(stream, []).append((node, after))
    while any(queues.values()):
        stream = draw.choice([k for k, q in queues.items() if q and all(v in values for v in q[0][1])])
        node, _ = queues[stream].pop(0)
        values[node] = result(node)
    return inputs


def same_in_any_order(module, placed, inputs, orders=15):
    expected = [v.clone() for v in inputs]
    for _, run in node_calls(module, tuple(expected)):
        run()
    draw = random.Random(0)
    for _ in range(orders):
        for mine, other in zip(run_in_some_order(module, placed, inputs, draw), expected, strict=True):
            if not torch.equal(mine, other):
                return False
    return True


def test_any_order_that_the_streams_allow_gives_the_same_result():
    for alg, model, shape in (("fedavg", "cnn4", (1, 16, 16)), ("scaffold", "mlp", (4,)), ("gpfl", "mlp", (4,))):
        module, inputs = step_graph(alg, model, shape)
        placed = assign_streams(module.graph)
        assert len({stream for stream, _ in placed.values()}) > 1
        assert same_in_any_order(module, placed, inputs)


def test_without_waiting_values_would_be_read_before_they_are_computed():
    module, inputs = step_graph("fedavg", "cnn4", (1, 16, 16))
    placed = {node: Placement(stream, []) for node, (stream, _) in assign_streams(module.graph).items()}
    with pytest.raises(LookupError):
        same_in_any_order(module, placed, inputs)


def test_memory_is_overwritten_after_it_was_read():
    """The update of w waits for the product that reads w through a view, though it needs no result of it."""

    def step(count, w, v):
        far = (w.view(4, 2) @ v).sin().sum()
        return [w - v, v + far]

    w, v = torch.randn(2, 4), torch.randn(2, 4)
    module = trace(step, [torch.zeros(1), w, v])
    write_to_inputs(module, 1, 0)
    placed = assign_streams(module.graph)
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    (update,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sub_.Tensor)
    order = list(placed)
    behind = placed[update].stream == placed[product].stream and order.index(product) < order.index(update)
    assert product in placed[update].after or behind
    assert same_in_any_order(module, placed, [torch.zeros(1), w, v])
