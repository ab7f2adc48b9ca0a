"""Traced graphs, simplified and writing over their inputs, compute what the function returns."""

import torch
import torch.nn.functional as F

from fedloom.engine.graph import tracing
from fedloom.engine.graph.analysis import count_operations
from fedloom.engine.graph.in_place import reuse_buffers, write_to_inputs
from fedloom.engine.graph.tracing import trace


def check_in_place(step, state, steps=3):
    """Checks the state after some steps: as the step returns it, and as a graph leaves it that writes over its inputs.
    Returns the code of the graph."""
    expected = [v.clone() for v in state]
    for _ in range(steps):
        expected = [v.clone() for v in step(*expected)]
    count = torch.zeros(1, dtype=torch.int64)
    graph = trace(lambda count, *flat: step(*flat), [count, *state])
    write_to_inputs(graph, 1, 0)
    found = [v.clone() for v in state]
    for _ in range(steps):
        graph(count, *found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert count.item() == steps
    return graph.code


def test_updates_happen_in_place():
    w, v = torch.randn(3, 4), torch.randn(3, 4)
    code = check_in_place(lambda w, v: [w - 0.1 * (w * v).sin(), v], [w, v])
    assert "sub_" in code
    assert "copy_" not in code


def test_a_value_that_is_read_after_its_update_is_not_overwritten_early():
    w, v = torch.randn(3), torch.randn(3)

    def step(w, v):
        new = w - v
        return [new, torch.cos(w.view(3)) + new]

    check_in_place(step, [w, v])


def test_state_tensors_may_be_exchanged_or_returned_beside_their_new_values():
    a, b, c = (torch.randn(2, 3) for _ in range(3))

    def step(a, b, c):
        return [b, a.t().t() + 0, torch.sub(a, b)]

    def swap(a, b, c):
        return [b, a, torch.sub(c, b)]

    def keep(a, b, c):
        return [torch.sub(a, 0.5), a, b.view(2, 3)]

    for f in (step, swap, keep):
        check_in_place(f, [a, b, c])


def test_values_that_change_later_are_written_in_time():
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
        check_in_place(step, [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 2, 4)])


def test_buffers_are_reused_only_after_their_last_read():
    """Memory is still in use if there is a later reader, or one through a view, and if it is an input or a result."""

    def f(x, y):
        a, b, c, d = x * 2, x * 3, x * 4, x * 5
        kept = torch.relu(a) + a
        seen = b.t()
        late = torch.relu(b) + seen
        mixed = c * c.t()
        return [kept, late, mixed, torch.relu(d), d, torch.relu(x), y - torch.relu(y * 2)]

    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    before, graph = [v.clone() for v in inputs], trace(f, inputs)
    expected = f(*inputs)
    reuse_buffers(graph)
    assert ".out(" in graph.code  # some are reused
    assert all(map(torch.equal, graph(*inputs), expected))
    assert all(map(torch.equal, inputs, before))


def test_in_place_operations_do_not_prevent_equal_operations_from_being_merged():
    """They become out-of-place ones, unless something else reads the memory that they write."""

    def step(a):
        b = a.exp()
        c = b.unsqueeze(0)
        c.reciprocal_()  # seen through b
        return [a.sin() + a.sin() + (a + 1).unsqueeze_(0).reciprocal_()[0], b]

    a = torch.randn(3)
    graph = trace(lambda a: step(a), [a])
    assert graph.code.count("reciprocal_.") == 1
    torch.testing.assert_close(graph(a), step(a), rtol=0, atol=0)
    unread = trace(lambda a: [a.sin() + a.sin() + (a + 1).unsqueeze_(0).reciprocal_()[0]], [a])
    assert "_." not in unread.code.replace("ops.aten", "")
    assert unread.code.count("sin.default") == 1


def test_zeros_are_neither_multiplied_nor_added(monkeypatch):
    """Also through views, and where they are too large to be kept as constants. Additions that broadcast, or that scale
    the other summand, stay."""

    def one(x, w):
        h = x.new_zeros(2, 3, 3).transpose(1, 2)[1]
        first = torch.addmm(h @ w, x, w)
        return first + torch.zeros(3), x.new_zeros(2, 3, 3) + x, torch.add(x.new_zeros(3, 3), x, alpha=2)

    inputs = torch.randn(4, 3, 3), torch.randn(4, 3, 3)
    for most in (tracing.MAX_CONSTANT, 0):
        monkeypatch.setattr(tracing, "MAX_CONSTANT", most)
        graph = trace(torch.func.vmap(one), inputs)
        # not to the bit: sums may round differently without the zeros
        torch.testing.assert_close(graph(*inputs), torch.func.vmap(one)(*inputs))
        assert graph.code.count("mm.default") == 1
        assert graph.code.count("add.Tensor") == 2
        assert graph.code.count("zeros.default") == (0 if most else 2)


def test_zeros_that_are_written_to_are_not_taken_for_zeros():
    def step(x, w):
        h = x.new_zeros(3, 3)
        h[1] = 1
        return [h @ w + x]

    inputs = torch.randn(3, 3), torch.randn(3, 3)
    torch.testing.assert_close(trace(step, inputs)(*inputs), step(*inputs), rtol=0, atol=0)


def test_max_pooling_is_moved_before_relu():
    """Results are the same to the bit, with ties, and with windows that overlap; the order stays where something else
    reads the result of ReLU."""

    def network(x, size, step, more):
        y = torch.relu(x)
        return (F.max_pool2d(y, size, step) ** 2).sum() + (y.sum() if more else 0)

    x = torch.randn(3, 2, 8, 8).mul(2).round()
    for size, step, more in ((2, 2, False), (3, 2, False), (2, 2, True)):

        def gradient(x):
            return [torch.func.grad(lambda x: network(x, size, step, more))(x)]  # noqa: B023

        for f in (gradient, lambda x: torch.func.vmap(gradient)(x[:, None])):
            graph = trace(f, [x])
            relu_first = graph.code.index("relu.default") < graph.code.index("max_pool2d_with_indices.default")
            assert relu_first == more
            torch.testing.assert_close(graph(x), f(x), rtol=0, atol=0)


def test_only_operations_that_compute_something_are_counted():
    graph = trace(lambda x: [x.t().max(0).values.relu().view(2, 2)], [torch.randn(4, 3)])
    assert count_operations(graph) == 2
