"""Programs in lanes: every order that the lanes allow gives the same result."""

import random

import numpy as np
import pytest
import torch
from helpers import SingleRun, method, model_task

from fedloom.core.tree import tree_flatten
from fedloom.engine.graph.multi_stream import Placement, operations, place
from fedloom.engine.graph.stacked_step import StackedStep, flat_inputs
from fedloom.engine.graph.tracing import trace, write_to_inputs
from fedloom.engine.planning import choose
from fedloom.engine.planning.plan import Plan


def step_program(alg, model, shape):
    """A step of two clients that overwrites their state, and its inputs."""
    task = model_task(model, shape, sizes=(6, 6))
    plan = Plan("stacked", "eager", chunk=2, convolutions={})
    run = SingleRun(method(alg), task, 0, plan=plan)
    cohort = run.cohort(np.arange(2), 0)
    with torch.no_grad():
        work, phase = run.executor.begin(cohort), method(alg).phases(task)[0]
        window = choose._schedule(task, phase, cohort, 1).window(task, np.arange(2), 0, 1)
        sides, shared = flat_inputs(cohort)
        inputs = [*(v[0] for v in window), torch.zeros(1, dtype=torch.int64), *tree_flatten(work)[0], *sides, *shared]
        step = StackedStep(task, phase, work, cohort, plan)

        def counted(*flat):
            return step(*flat[:6], *flat[7:])

        inputs = [v.clone() for v in (*inputs, task.data.x, task.data.y)]
        program = trace(counted, inputs)
        write_to_inputs(program, 7, 6)
    return program, inputs


def in_some_order(program, placed, inputs, draw):
    """Carried out by lanes that run ahead of each other as they like, but for what they wait for."""
    inputs = [v.clone() for v in inputs]
    values = dict(zip(program.graph.find_nodes(op="placeholder"), inputs, strict=True))

    def value(node):
        if node.op == "get_attr":
            return getattr(program, node.target)
        if node not in values and node in placed:
            raise LookupError(f"{node} is read before it is there")
        return values[node] if node in values else result(node)  # what only shows memory

    def result(node):
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
        return node.target(*args, **kwargs)

    queues = {}
    for node, (lane, after) in placed.items():
        queues.setdefault(lane, []).append((node, after))
    while any(queues.values()):
        lane = draw.choice([k for k, q in queues.items() if q and all(v in values for v in q[0][1])])
        node, _ = queues[lane].pop(0)
        values[node] = result(node)
    return inputs


def check(program, placed, inputs, orders=15):
    expected = [v.clone() for v in inputs]
    for _, run in operations(program, tuple(expected)):
        run()
    draw = random.Random(0)
    for _ in range(orders):
        for mine, other in zip(in_some_order(program, placed, inputs, draw), expected, strict=True):
            if not torch.equal(mine, other):
                return False
    return True


def test_any_order_that_lanes_allow_gives_the_same_result():
    for alg, model, shape in (("fedavg", "cnn4", (1, 16, 16)), ("scaffold", "mlp", (4,)), ("gpfl", "mlp", (4,))):
        program, inputs = step_program(alg, model, shape)
        placed = place(program.graph)
        assert len({lane for lane, _ in placed.values()}) > 1
        assert check(program, placed, inputs)


def test_without_waiting_it_would_not():
    program, inputs = step_program("fedavg", "cnn4", (1, 16, 16))
    placed = {node: Placement(lane, []) for node, (lane, _) in place(program.graph).items()}
    with pytest.raises(LookupError):
        check(program, placed, inputs)


def test_what_is_overwritten_has_been_read():
    """The step on w waits for the product that reads w through a view, though it needs nothing of it."""

    def step(count, w, v):
        far = (w.view(4, 2) @ v).sin().sum()
        return [w - v, v + far]

    w, v = torch.randn(2, 4), torch.randn(2, 4)
    program = trace(step, [torch.zeros(1), w, v])
    write_to_inputs(program, 1, 0)
    placed = place(program.graph)
    (product,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    (update,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.sub_.Tensor)
    order = list(placed)
    behind = placed[update].lane == placed[product].lane and order.index(product) < order.index(update)
    assert product in placed[update].after or behind
    assert check(program, placed, [torch.zeros(1), w, v])
