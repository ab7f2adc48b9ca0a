"""Costs of methods are those that a reader of the papers would count by hand, and what runs record.

FLOPs of a dense layer from a to b units, for one sample: 2ab forward, 2ab for the gradient to its weights, and 2ab for
the gradient to its inputs, which the first layer does not need.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import REFERENCE, SingleRun, logreg_task, make_task, method, model_task, state_bytes
from torch import nn

from fedloom.core.autodiff import vmap
from fedloom.engine.costs import counted, method_costs, model_size
from fedloom.engine.simulation import Simulation
from fedloom.nn.network import Network

SIZES = (7, 23, 40, 12)  # 1, 3, 4 and 2 batches of 10
STEPS, SAMPLES = 2.5, 20.5  # in an epoch, on average
BODY, HEAD = 2 * 6 * 8, 2 * 8 * 4  # FLOPs of SmallNet's layers forward, 6 -> 8 -> 4
FORWARD = BODY + HEAD
GRADIENT = 2 * FORWARD + HEAD  # forward, to all weights, to the inputs of the head
PARAMETERS = 6 * 8 + 8 + 8 * 4 + 4
HYPERNETWORK = 2 * (13 * 100 + 100 * 100 + 100 * 400)  # pFedKT's, one call
TO_INPUTS = 2 * (100 * 100 + 100 * 400)  # gradient to the inputs of its second and third layer
LEARNS = 2 * HYPERNETWORK + TO_INPUTS  # the hypernetwork forward and backward


def costs(alg, sizes=SIZES, **settings):
    settings = {"data": {"server": 12}, **settings}
    return method_costs(Simulation(alg, make_task(sizes, **settings), seed=0))


def test_fedavg_on_logistic_regression():
    """Two clients with 4 samples of 2 numbers, 2 classes: a forward pass is 2 * 2 * 2 FLOPs, so is the gradient to the
    weights, and there is none to the inputs. The server multiplies each of 6 parameters of each client by a weight."""
    found = method_costs(Simulation(method("fedavg"), logreg_task((4, 4)), seed=0))
    assert (found.parameters, found.flops_forward) == (6, 8)
    assert (found.gradients, found.samples, found.flops) == (1, 4, 4 * (8 + 8))
    assert (found.bytes_down, found.bytes_up, found.client_bytes, found.server_bytes) == (48, 48, 0, 48)
    assert (found.server_flops, found.cohort, found.exact) == (2 * 2 * 6, 2, True)


@pytest.mark.parametrize(
    ("name", "settings", "per_sample"),
    [
        ("fedavg", {}, GRADIENT),
        ("fedprox", {}, GRADIENT),  # the proximal term is elementwise
        ("scaffold", {}, GRADIENT),
        ("fedsam", {}, 2 * GRADIENT),  # a gradient to perturb, and one there
        ("ditto", {}, 2 * GRADIENT),
        ("ditto", {"personal_epochs": 3}, 4 * GRADIENT),
        ("pfedme", {}, 5 * GRADIENT),
        ("moon", {}, GRADIENT + 2 * FORWARD),  # the global and the last model predict
        # an epoch of the head, whose gradient ends there, and one of the body, whose gradient passes the head
        ("fedrep", {}, (FORWARD + HEAD) + (FORWARD + HEAD + BODY)),
        ("fedbabu", {}, FORWARD + HEAD + BODY),
        ("mapper", {}, 3 * GRADIENT + 3 * FORWARD + GRADIENT),  # train and judge three candidates, train their mixture
    ],
)
def test_flops_of_a_client(name, settings, per_sample):
    """For batches of any size, also for those that are not full."""
    assert costs(method(name, **settings)).flops == pytest.approx(per_sample * SAMPLES)


def test_flops_that_do_not_depend_on_samples():
    """pFedKT: the hypernetwork generates the model once in a round and once in every step, in which it also learns; the
    global and the last model predict. With one step of the hypernetwork in a round, it learns at the end."""
    each = GRADIENT + 2 * FORWARD
    found = costs(method("pfedkt"))
    assert found.flops == pytest.approx(HYPERNETWORK + STEPS * (LEARNS + HYPERNETWORK) + SAMPLES * each)
    assert found.client_bytes == 8 * (PARAMETERS + 51_900)
    assert costs(method("pfedkt", hn_update="step")).flops == pytest.approx(HYPERNETWORK + LEARNS + SAMPLES * each)


def test_pairs_of_batches():
    """Per-FedAvg: a client with 40 samples makes two steps with two batches of 10, one with 23 makes one."""
    assert costs(method("per-fedavg")).flops == pytest.approx((20 + 40) / 4 * GRADIENT)


def test_epochs_and_cohorts():
    found = costs(method("fedavg"), epochs=3, participation=0.5)
    assert found.flops == pytest.approx(3 * SAMPLES * GRADIENT)
    assert (found.cohort, found.server_flops) == (2, 2 * 2 * PARAMETERS)


def test_server_that_generates_models():
    """pFedHN, for each of four clients: the hypernetwork forward and backward, down to the embedding of 2 numbers, and
    forward once more for the download."""
    forward = 2 * (2 * 100 + 5 * 100 * 100 + 100 * PARAMETERS)
    assert costs(method("pfedhn")).server_flops == 4 * (3 * forward + forward)


CONV = 2 * 9 * 16 * 8 * 8, 2 * 9 * 16 * 32 * 4 * 4  # of cnn8 on 8x8 pixels with one channel
DENSE = 2 * 32 * 2 * 2 * 64 + 2 * 64 * 3
CNN_GRADIENT = 2 * (sum(CONV) + DENSE) + CONV[1] + DENSE


def test_convolutions_also_of_stacked_models():
    """MAPPER trains three candidates under `vmap`, where convolutions have groups."""
    task = model_task("cnn8", (1, 8, 8), sizes=(4, 8))
    assert model_size(task).flops == sum(CONV) + DENSE
    found = {name: method_costs(Simulation(method(name), task, seed=0)).flops for name in ("fedavg", "mapper")}
    assert found["fedavg"] == 6 * CNN_GRADIENT
    assert found["mapper"] == 6 * (4 * CNN_GRADIENT + 3 * (sum(CONV) + DENSE))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_layers(kind, dtype):
    """At each of 4 positions, every gate is a product with 6 inputs and one with 7 units."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.cells, self.head = nn.Embedding(5, 6), kind(6, 7, batch_first=True), nn.Linear(7, 5)

        def forward(self, x):
            return self.head(self.cells(self.words(x))[0])

    network = Network(Tokens, "head", torch.zeros(2, 4, dtype=torch.int64), dtype)
    params, x = network.init(0), torch.zeros(3, 4, dtype=torch.int64)
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    forward = 3 * 4 * 2 * (gates * 7 * (6 + 7) + 7 * 5)

    def predict(weights):
        return network.apply(weights, {}, x, train=True).logits

    def gradient(weights):
        weights = {name: v.clone().requires_grad_() for name, v in weights.items()}
        with torch.enable_grad():
            return torch.autograd.grad(predict(weights).sum(), list(weights.values()))

    assert counted(predict, params)[1] == forward
    first_state = 3 * 2 * gates * 7 * 7  # its gradient is not needed, but some kernels compute it
    assert counted(gradient, params)[1] in (3 * forward, 3 * forward - first_state)
    stacked = {name: torch.stack([v, v]) for name, v in params.items()}
    assert counted(vmap(predict), stacked)[1] == 2 * forward


def test_what_counts_as_an_operation():
    a, b = torch.ones(3, 4), torch.ones(4)
    assert counted(lambda: torch.tanh(a * a + b).sum(0).norm())[1] == 0
    assert counted(lambda: a @ b)[1] == counted(lambda: torch.addmv(torch.ones(3), a, b))[1] == 2 * 3 * 4
    assert counted(lambda: b @ b)[1] == 2 * 4
    x, w = torch.ones(2, 3, 4, 4, requires_grad=True), torch.ones(3, 5, 2, 2, requires_grad=True)
    forward = 2 * 2 * 3 * 4 * 4 * 5 * 2 * 2
    assert counted(lambda: torch.autograd.grad(F.conv_transpose2d(x, w).sum(), [x, w]))[1] == 3 * forward
    q = torch.ones(1, 1, 5, 8)
    assert counted(F.scaled_dot_product_attention, q, q, q)[1] == 2 * 2 * 5 * 5 * 8


def test_running_statistics_are_private_state():
    assert costs(method("fedavg"), norm=True).client_bytes == 2 * 8 * 8


SENT = ("fedavg", "fedrep", "lg-fedavg", "scaffold", "hypcluster", "fedproto", "fedfomo", "gpfl", "pfedhn", "local")


@pytest.mark.parametrize("name", SENT)
def test_bytes_and_gradients_are_those_that_a_run_records(name):
    """In the second round: FedFomo sends no models in the first."""
    run = SingleRun(method(name), make_task(SIZES, data={"server": 12}), seed=0, plan=REFERENCE)
    before = state_bytes(run)
    found = method_costs(run.simulation)
    assert state_bytes(run) == before
    _, done = (run.advance(evaluate=False) for _ in range(2))
    assert (found.bytes_down, found.bytes_up) == (done.bytes_down / 4, done.bytes_up / 4)
    assert (found.gradients, found.samples) == pytest.approx((done.gradients, done.samples))


def test_methods_that_choose_their_epochs_are_marked():
    assert not costs(method("dap-fl")).exact
