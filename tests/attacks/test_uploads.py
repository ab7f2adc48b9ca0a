"""What the server sees: uploads as they leave the clients, and the networks that they show."""

import pytest
import torch
import torch.nn.functional as F
from helpers import SingleRun, logreg_task, make_task, method, methods, token_task
from oracles import batches

from fedloom.attacks.uploads import UploadRecorder, first_batches, shown, views, why_not
from fedloom.core.keys import root
from fedloom.core.privacy import UploadPrivacy
from fedloom.core.tree import tree_map

SEED = 3


def watched(name, rounds=1, wanted=None, task=None, **settings):
    """A run of a method, and the uploads of client 1 (or of those that are wanted, by round)."""
    alg = method(name, **settings)
    task = task or make_task((20, 24, 28), lr=0.05, batch_size=4, rounds=rounds, data={"server": 12, "held_out": 6})
    run = SingleRun(alg, task, SEED, plan="per-client")
    recorder = UploadRecorder(run.constants, wanted or {rounds - 1: [1]})
    run.clients.on_upload = recorder
    for _ in range(rounds):
        run.advance(evaluate=False)
    return run, recorder.uploads


def seen(run, upload):
    return shown(run.alg, run.task, upload, SEED)


def found_views(run, upload):
    return views(run.alg, run.task, seen(run, upload).uploaded)


@pytest.mark.parametrize("name", methods())
def test_uploads_show_parameters_before_and_after_training(name):
    """Whatever a method uploads, a model or a change, before or after: what is shown are the same parameters before and
    after training, and with a whole model the loss on client 1's training samples is smaller after it."""
    run, (upload,) = watched(name)
    task, data = run.task, run.task.data
    if why_not(run.alg, task, upload.up):
        pytest.skip("shows no network")
    before, after = seen(run, upload)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    rows = data.splits["train"][1]
    whole = views(run.alg, task, after)[-1]
    if whole.name == "model":
        loss = [F.cross_entropy(whole.forward(params, data.x[rows]), data.y[rows]) for params in (before, after)]
        assert loss[1] < loss[0]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fedavg", ["body", "model"]),
        ("fedrod", ["body", "model"]),
        ("fedper", ["body"]),
        ("fedrep", ["body"]),
        ("gpfl", ["body", "body, valve", "body, valve, embeddings"]),
    ],
)
def test_the_parts_of_the_paper_s_table(name, parts):
    run, (upload,) = watched(name)
    network, found = run.task.network, found_views(run, upload)
    assert [view.name for view in found] == parts
    assert set(found[0].attacked) == set(network.body)
    more = {"V/weight", "V/bias", "V/scale", "V/shift"}
    expected = {
        "model": {*network.body, *network.head},
        "body, valve": {*network.body, *more},
        "body, valve, embeddings": {*network.body, *more, "C/weight"},
    }
    for view in found[1:]:
        assert set(view.attacked) == expected[view.name]


def test_a_change_is_what_was_sent_less_what_was_uploaded():
    """FedAvg starts from the seed's model in round 0, and uploads what it has trained."""
    run, (upload,) = watched("fedavg")
    before, after = seen(run, upload)
    initial = run.task.init(root(SEED, "init"))
    assert all(torch.equal(before[name], initial[name]) for name in initial)
    assert all(torch.equal(after[name], upload.up["w"][name]) for name in initial)


@pytest.mark.parametrize("name", ["scaffold", "fedprox"])
def test_methods_that_begin_like_fedavg_show_the_same(name):
    """SCAFFOLD uploads a change, with zero control variates in round 0; FedProx with weight 0 is FedAvg."""
    settings = {"mu": 0.0} if name == "fedprox" else {}
    (run, (upload,)), (plain, (other,)) = watched(name, **settings), watched("fedavg")
    for mine, theirs in zip(seen(run, upload), seen(plain, other), strict=True):
        assert all(torch.allclose(mine[k], theirs[k], rtol=0, atol=1e-12) for k in theirs)


def test_of_fedfomo_the_server_knows_the_model_that_the_client_sent_before():
    run, (first, second) = watched("fedfomo", 2, wanted={0: [1], 1: [1]})
    initial = run.task.init(root(SEED, "init"))
    assert all(torch.equal(v, initial[k]) for k, v in seen(run, first).sent.items())
    assert all(torch.equal(v, first.up["theta"][k]) for k, v in seen(run, second).sent.items())


def test_networks_are_in_evaluation_mode_with_the_running_statistics_of_the_start():
    """Running statistics are never sent. In training mode outputs would depend on the rest of the batch."""
    task = make_task((20, 24), norm=True, dropout=0.5, batch_size=4, lr=0.05)
    run, (upload,) = watched("fedavg", task=task)
    x, after = task.data.x[:6], seen(run, upload).uploaded
    body, model = found_views(run, upload)
    together = model.forward(after, x)
    assert torch.allclose(together[:2], model.forward(after, x[:2]), rtol=0, atol=1e-12)
    expected = F.linear(x, after["first.weight"], after["first.bias"]) / (1 + 1e-5) ** 0.5  # mean 0, variance 1
    expected = torch.tanh(expected * after["norm.weight"] + after["norm.bias"])
    assert torch.allclose(body.forward(after, x), expected, rtol=0, atol=1e-9)
    expected = F.linear(expected, after["head.weight"], after["head.bias"])
    assert torch.allclose(together, expected, rtol=0, atol=1e-9)


def test_the_networks_of_gpfl():
    """-sfe is x -> CoV(body(x), g) with g the mean of the uploaded embeddings; -sm takes cosines of that with them."""
    run, (upload,) = watched("gpfl")
    after, x = seen(run, upload).uploaded, run.task.data.x[:5]
    body, sfe, sm = found_views(run, upload)
    f, C = torch.tanh(F.linear(x, after["first.weight"], after["first.bias"])), after["C/weight"]
    assert torch.allclose(body.forward(after, x), f, rtol=0, atol=1e-12)
    made = F.relu(F.linear(C.mean(0), after["V/weight"]).view(2, -1) + after["V/bias"])
    gamma, beta = F.layer_norm(made, (8,)) * after["V/scale"] + after["V/shift"]
    f_G = F.relu((gamma + 1) * f + beta)
    assert torch.allclose(sfe.forward(after, x), f_G, rtol=0, atol=1e-12)
    expected = torch.stack([F.cosine_similarity(f_G, c[None]) for c in C], 1)
    assert torch.allclose(sm.forward(after, x), expected, rtol=0, atol=1e-9)


def test_no_gradient_flows_through_the_condition_of_gpfl():
    """As in training, where g belongs to the round: of -sfe, the embeddings have no gradient at all."""
    run, (upload,) = watched("gpfl")
    params = {name: v.clone().requires_grad_() for name, v in seen(run, upload).uploaded.items()}
    _, sfe, sm = found_views(run, upload)
    x = run.task.data.x[:5]
    (none,) = torch.autograd.grad(sfe.forward(params, x).sum(), [params["C/weight"]], allow_unused=True)
    assert none is None
    (some,) = torch.autograd.grad(sm.forward(params, x).sum(), [params["C/weight"]])
    assert some.abs().max() > 0


def test_uploads_are_seen_after_clipping_and_noise():
    """Clipped to 0.1 with noise of 20 of these, a change is noise with standard deviation 2. There are 92 numbers, of
    whose standard deviation the error is 1 / sqrt(2 * 92), 7 percent."""
    task = make_task((20, 24), batch_size=4, privacy=UploadPrivacy(0.1, 20.0))
    run, (upload,) = watched("fedavg", task=task)
    before, after = seen(run, upload)
    change = torch.cat([(after[k] - before[k]).flatten() for k in after])
    assert change.std() == pytest.approx(2, rel=0.3)


def test_only_the_uploads_that_are_wanted_are_kept():
    run, found = watched("fedavg", 3, wanted={0: [0, 2], 2: [1]})
    assert [(upload.t, upload.client) for upload in found] == [(0, 0), (0, 2), (2, 1)]
    assert found[0].previous is None
    assert set(found[0].down) == {"w"}
    kept = tree_map(torch.clone, found[0].up)
    run.advance(evaluate=False)
    assert all(torch.equal(kept["w"][k], v) for k, v in found[0].up["w"].items())


def test_the_first_batches_are_those_of_the_client_s_first_pass():
    task = make_task((5, 23), batch_size=10)
    found = list(first_batches(task, SEED, 4, 1, 2))
    expected = batches(task, 1, 4, epochs=1, seed=SEED)[:2]
    assert all(torch.equal(batch.x, x) for batch, (x, _) in zip(found, expected, strict=True))
    assert [len(batch.x) for batch in first_batches(task, SEED, 4, 1, 9)] == [10, 10, 3]


@pytest.mark.parametrize(
    ("name", "task", "why"),
    [
        ("local", None, "it uploads nothing"),
        ("lg-fedavg", None, "it uploads the head only"),
        ("fedproto", None, "nothing that it uploads has the shape of model parameters (mean features of each class"),
        ("fedavg", token_task, "samples are words or characters"),
        ("lg-fedavg", logreg_task, ""),  # without a body, the head is all
        ("fedavg", logreg_task, ""),
    ],
)
def test_what_cannot_be_attacked_is_said(name, task, why):
    run, (upload,) = watched(name, task=task and task(rounds=1))
    found = why_not(run.alg, run.task, upload.up)
    assert found.startswith(why) if why else not found
