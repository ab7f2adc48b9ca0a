"""Graph passes for a CPU: steps give what they gave before, up to rounding, and change nothing that others hold."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers import RAGGED, SingleRun, assert_same, logreg_task, make_task, method

from fedloom import Algorithm, Phase
from fedloom.core.federation import gather_rows
from fedloom.engine.graph import cpu_passes
from fedloom.engine.graph.cpu_passes import fuse_bmm_updates, fuse_cross_entropy
from fedloom.engine.graph.tracing import trace
from fedloom.engine.plan import Plan

aten = torch.ops.aten
TRACED = Plan("stacked", "traced", chunk=3, shrink=0.3)


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch):
    monkeypatch.setattr(cpu_passes, "MIN_ROWS", 1)
    monkeypatch.setattr(cpu_passes, "VECTOR_BYTES", 64)


def operations(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def gradient(y, weight):
    """That of a weighted cross entropy, as a function of logits."""

    def loss(x):
        return -(F.log_softmax(x, -1).gather(-1, y[..., None]).squeeze(-1) * weight).sum()

    return torch.func.grad(loss)


# -- cross entropy


@pytest.mark.parametrize("classes", [2, 7])
def test_the_gradient_of_a_cross_entropy_is_that_of_torch(classes):
    x, y, weight = torch.randn(3, 5, classes).double(), torch.randint(0, classes, (3, 5)), torch.rand(3, 5).double()
    weight[0, 2:] = 0  # padding
    f = gradient(y, weight)
    module = trace(lambda x: [f(x)], [x])
    fuse_cross_entropy(module)
    assert aten._softmax.default in operations(module)
    assert aten._log_softmax.default not in operations(module)
    (found,) = module(x)
    torch.testing.assert_close(found, f(x), rtol=1e-12, atol=1e-14)


def test_a_loss_that_is_read_is_computed():
    x, y = torch.randn(3, 5, 4).double(), torch.randint(0, 4, (3, 5))

    def step(x):
        g = gradient(y, torch.ones(3, 5).double())(x)
        return [g, F.log_softmax(x, -1).gather(-1, y[..., None])]

    module = trace(step, [x])
    fuse_cross_entropy(module)
    assert aten._log_softmax.default in operations(module)
    torch.testing.assert_close(module(x), step(x), rtol=0, atol=0)


def step_operations(task, **settings):
    """The operations of the first traced step of FedAvg."""
    run = SingleRun(method("fedavg", **settings), task, 0, plan=Plan("stacked", "traced", chunk=2))
    run.advance(evaluate=False)
    (runner,) = run.executor.runners.values()
    (graph, *_) = runner.graphs.values()
    return operations(graph.run.__self__)


def test_few_classes_are_fused_in_a_step_of_training():
    found = step_operations(logreg_task(classes=3))
    assert aten._softmax.default in found
    assert aten._log_softmax.default not in found


@pytest.mark.parametrize("why", ["many classes", "few rows"])
def test_other_losses_are_left_to_torch(why, monkeypatch):
    """Eight numbers in float64 fill a register; two clients have batches of ten."""
    if why == "few rows":
        monkeypatch.setattr(cpu_passes, "MIN_ROWS", 21)
    found = step_operations(logreg_task(classes=8 if why == "many classes" else 3))
    assert aten._softmax.default not in found
    assert aten._log_softmax.default in found


# -- updates in the memory of the weights


def fused(step, inputs, first=0, count=None):
    """The graph of a step with its updates fused, and what it overwrites."""
    module = trace(step, inputs)
    return module, fuse_bmm_updates(module, first, len(inputs) - first if count is None else count)


def matrices(*shapes):
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_an_update_by_a_product_is_computed_in_the_memory_of_the_weights():
    w, a, b = matrices((2, 3, 4), (2, 3, 5), (2, 5, 4))

    def step(w, a, b):
        return [torch.sub(w, torch.bmm(a, b), alpha=0.1)]

    module, overwritten = fused(step, [w, a, b], count=1)
    assert overwritten == [0]
    (expected,) = step(w, a, b)
    (found,) = module(w, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    assert found.data_ptr() == w.data_ptr()


def forward_later(w, a, b):
    """w is read after its update."""
    new = torch.sub(w, torch.bmm(a, b), alpha=0.1)
    return [new, torch.bmm(new, torch.bmm(a, b).transpose(1, 2)) + w.view(2, 12).sum()]


def keep_old(w, a, b):
    return [torch.sub(w, torch.bmm(a, b), alpha=0.1), w.transpose(1, 2)]


def multiply_by_itself(w, a, b):
    return [torch.sub(w, torch.bmm(a[:, :, :3], w), alpha=0.1), b]


def return_twice(w, a, b):
    new = torch.sub(w, torch.bmm(a, b), alpha=0.1)
    return [new, new]


@pytest.mark.parametrize("step", [forward_later, keep_old, multiply_by_itself, return_twice])
def test_weights_that_somebody_still_needs_are_not_overwritten(step):
    inputs = matrices((2, 3, 4), (2, 3, 5), (2, 5, 4))
    module, overwritten = fused(step, inputs, count=2)
    assert overwritten == []
    torch.testing.assert_close(module(*inputs), step(*inputs), rtol=1e-14, atol=1e-14)


@dataclass(frozen=True)
class Remembering(Algorithm):
    """FedAvg whose clients also send the model before the last step, which is the same tensor as the slot's before it,
    and the one that they received."""

    name = "remembering-test"
    shared, private = "model w", "nothing"

    def init_server(self, task, key):
        return {"w": task.init(key), "before": task.init(key)}

    def begin(self, task, down, state, info):
        return {"w": task.slot(down["w"]), "before": down["w"], "received": down["w"]}

    def phases(self, task):
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        return {**work, "w": task.step(w, g), "before": work["w"].params}

    def finish(self, task, work, down, state, info):
        return state, {"w": work["w"].params, "before": work["before"], "received": work["received"]}

    def aggregate(self, task, server, up, info, t, key):
        sent = {name: task.average(up[name], info.n) for name in ("w", "before", "received")}
        for name, value in server["w"].items():
            torch.testing.assert_close(sent["received"][name], value, rtol=1e-12, atol=1e-12)
        return {"w": sent["w"], "before": sent["before"]}

    def model(self, task, work, down, info):
        return work["w"]


def test_models_that_share_memory_at_the_beginning_stay_apart():
    assert_same(Remembering(), make_task(RAGGED), TRACED, 1e-9)


def test_what_a_step_starts_from_is_not_changed():
    run = SingleRun(method("fedavg"), make_task((12, 12, 12)), 0, plan=TRACED)
    before = {name: value.clone() for name, value in run.server["w"].items()}
    server = run.server["w"]
    run.advance(evaluate=False)
    (runner,) = run.executor.runners.values()
    assert any(graph.overwrites for graph in runner.graphs.values())
    for name, value in server.items():
        assert torch.equal(value, before[name])


# -- gathering


@pytest.mark.parametrize("shape", [(), (4,), (1, 3, 3)])
@pytest.mark.parametrize(
    "rows", [torch.tensor([4, 0, 4]), torch.tensor([[1, 2], [3, 0]]), torch.zeros(0, dtype=torch.int64)]
)
def test_rows_are_gathered_as_by_an_index(shape, rows):
    x = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    assert torch.equal(gather_rows(x, rows), x[rows])
