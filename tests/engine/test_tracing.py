"""Programs that write over their inputs leave there what the step returns."""

import re

import torch
import torch.nn.functional as F

from fedloom.engine.graph import tracing as tracing
from fedloom.engine.graph.tracing import fuse_small_updates, operations, trace, write_to_inputs


def after(step, state, steps=3):
    """State after some steps: as the step returns it, and as a program leaves it that overwrites, one by one and at
    once."""
    expected = [v.clone() for v in state]
    for _ in range(steps):
        expected = [v.clone() for v in step(*expected)]
    count = torch.zeros(1, dtype=torch.int64)
    program = trace(lambda count, *flat: step(*flat), [count, *state])
    write_to_inputs(program, 1, 0)
    code = program.code
    for _ in range(2):
        found = [v.clone() for v in state]
        for _ in range(steps):
            program(count, *found)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        fuse_small_updates(program, 0)
    assert count.item() == 2 * steps
    return code, program.code


def test_updates_happen_in_place():
    w, v = torch.randn(3, 4), torch.randn(3, 4)
    code, at_once = after(lambda w, v: [w - 0.1 * (w * v).sin(), v], [w, v])
    assert "sub_" in code
    assert "copy_" not in code
    assert "fedloom.update" in at_once
    assert "sub_" not in at_once


def test_a_value_that_is_read_after_its_update_is_not_overwritten_early():
    w, v = torch.randn(3), torch.randn(3)

    def step(w, v):
        new = w - v
        return [new, torch.cos(w.view(3)) + new]

    after(step, [w, v])


def test_states_may_change_places_and_be_kept_beside_their_successors():
    a, b, c = (torch.randn(2, 3) for _ in range(3))

    def step(a, b, c):
        return [b, a.t().t() + 0, torch.sub(a, b)]

    def swap(a, b, c):
        return [b, a, torch.sub(c, b)]

    def keep(a, b, c):
        return [torch.sub(a, 0.5), a, b.view(2, 3)]

    for f in (step, swap, keep):
        after(f, [a, b, c])


def test_small_states_are_written_at_once(monkeypatch):
    """Steps down and up, copies, and sums of rows; states of another size, kind or layout are left alone."""
    a, b, c, d = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 2), torch.randn(3)
    rows, table = torch.randn(3, 5, 4), torch.randn(3, 80, 2)

    def step(a, b, c, d, e, f, rows, table):
        slope = (rows * a[:, None]).sin()
        new = [torch.sub(a, slope.sum(1), alpha=0.1), torch.add(b, b.cos(), alpha=0.3), table.exp().sum(1), d.exp()]
        return [*new, e + 1, torch.sub(f, f.sin()), rows, table]

    numbers, turned = torch.arange(3), torch.randn(4, 3).t()
    _, code = after(step, [a, b, c, d, numbers, turned, rows, table], steps=2)
    (written,) = re.findall(r"fedloom\.update\.default\(\[([^]]*)\]", code)
    assert sorted(written.split(", ")) == ["arg1_1", "arg2_1", "arg3_1", "arg4_1"]
    assert code.count("aten.sum") == 1  # of 80 rows
    monkeypatch.setattr(tracing, "LITTLE", 6)
    _, code = after(step, [a, b, c, d, numbers, turned, rows, table], steps=2)
    assert "fedloom.update.default([arg3_1, arg4_1]" in code


def test_values_that_change_later_are_written_at_their_time():
    def whole(a, b, c):
        change = (a * b).sin()
        new = torch.sub(a, change)
        alias = change.view(-1)
        return [new, alias.mul_(3).view(3, 4).clone(), c]

    def rows(a, b, c):
        change = c.sin()
        new = torch.sub(a, change.sum(1))
        alias = change.view(-1)
        return [new, b, alias.mul_(3).view(3, 2, 4).clone()]

    def inputs(a, b, c):
        return [torch.sub(a, c.sum(1)), torch.sub(b, a), torch.sub(c, a[:, None])]

    for step in (whole, rows, inputs):
        after(step, [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 2, 4)])


def test_operations_in_place_do_not_keep_equal_ones_apart():
    """They become ones that give a value, unless somebody else sees what they write."""

    def step(a):
        b = a.exp()
        c = b.unsqueeze(0)
        c.reciprocal_()  # seen through b
        return [a.sin() + a.sin() + (a + 1).unsqueeze_(0).reciprocal_()[0], b]

    a = torch.randn(3)
    program = trace(lambda a: step(a), [a])
    assert program.code.count("reciprocal_.") == 1
    torch.testing.assert_close(program(a), step(a), rtol=0, atol=0)
    alone = trace(lambda a: [a.sin() + a.sin() + (a + 1).unsqueeze_(0).reciprocal_()[0]], [a])
    assert "_." not in alone.code.replace("ops.aten", "")
    assert alone.code.count("sin.default") == 1


def test_zeros_are_neither_multiplied_nor_added(monkeypatch):
    """Through views, and also where they are too large to be kept; sums that they widen, or where the other one is
    scaled, are left."""

    def one(x, w):
        h = x.new_zeros(2, 3, 3).transpose(1, 2)[1]
        first = torch.addmm(h @ w, x, w)
        return first + torch.zeros(3), x.new_zeros(2, 3, 3) + x, torch.add(x.new_zeros(3, 3), x, alpha=2)

    inputs = torch.randn(4, 3, 3), torch.randn(4, 3, 3)
    for small in (tracing.SMALL, 0):
        monkeypatch.setattr(tracing, "SMALL", small)
        program = trace(torch.func.vmap(one), inputs)
        torch.testing.assert_close(program(*inputs), torch.func.vmap(one)(*inputs), rtol=0, atol=0)
        assert program.code.count("mm.default") == 1
        assert program.code.count("add.Tensor") == 2
        assert program.code.count("zeros.default") == (0 if small else 2)


def test_zeros_that_are_written_to_count():
    def step(x, w):
        h = x.new_zeros(3, 3)
        h[1] = 1
        return [h @ w + x]

    inputs = torch.randn(3, 3), torch.randn(3, 3)
    torch.testing.assert_close(trace(step, inputs)(*inputs), step(*inputs), rtol=0, atol=0)


def test_the_largest_is_taken_before_its_positive_part():
    """To the bit, with ties, with windows that overlap, and where somebody else reads the positive parts."""

    def network(x, size, step, more):
        y = torch.relu(x)
        return (F.max_pool2d(y, size, step) ** 2).sum() + (y.sum() if more else 0)

    x = torch.randn(3, 2, 8, 8).mul(2).round()
    for size, step, more in ((2, 2, False), (3, 2, False), (2, 2, True)):

        def slope(x):
            return [torch.func.grad(lambda x: network(x, size, step, more))(x)]  # noqa: B023

        for f in (slope, lambda x: torch.func.vmap(slope)(x[:, None])):
            program = trace(f, [x])
            before = program.code.index("relu.default") < program.code.index("max_pool2d_with_indices.default")
            assert before == more
            torch.testing.assert_close(program(x), f(x), rtol=0, atol=0)


def test_operations_are_counted_that_compute_something():
    program = trace(lambda x: [x.t().max(0).values.relu().view(2, 2)], [torch.randn(4, 3)])
    assert operations(program) == 2
