"""pFedKT: hand-computed numbers, identities between its cases, and a second implementation in plain PyTorch."""

import copy
import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EAGER,
    PER_CLIENT,
    RAGGED,
    SingleRun,
    SmallNet,
    assert_same,
    client_state,
    full_batch_task,
    make_batch,
    make_task,
    method,
    run_and_evaluate,
    run_rounds,
    running_statistics,
    token_task,
)
from oracles import (
    assert_equal,
    assert_near,
    assert_same_scores,
    client_samples,
    dense_layers,
    dense_values,
    is_equal,
    is_near,
    values,
)
from sentences import user_error
from torch import nn

import fedloom
from fedloom.algorithms.parts import approach, dense
from fedloom.algorithms.parts.distances import DISTANCES, batch_mean, contrast, cos, cosine, kl, l2, mse
from fedloom.config.keywords import from_keywords
from fedloom.engine.plan import Plan
from fedloom.studies.build import make_task as build_task


def single_step(alg, task, varphi, omega, down):
    """The paper's update of the hypernetwork."""
    return approach.clipped_step(alg.gap(task, omega, down), varphi, alg.eta_hn, alg.hn_clip)


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


ONE = make_batch(None, torch.tensor([0]))


def l_con(z, gm, old, batch=ONE, **settings):
    """The contrastive loss of outputs z, with those of the global and the old model."""
    return method("pfedkt", **settings).contrastive(z, gm, old, batch)


# -- distances and losses ---------------------------------------------------------------------------------------------


def test_kl_goes_from_the_teacher_to_the_student():
    """softmax(ln 3, 0) = (3/4, 1/4), softmax(0, 0) = (1/2, 1/2). Teacher first: 3/4 ln(3/2) + 1/4 ln(1/2) = 0.304099 -
    0.173287 = 0.130812; the other way round it would be 1/2 ln(2/3) + 1/2 ln 2 = 0.143841."""
    assert kl(row(0, 0), row(math.log(3), 0)).item() == pytest.approx(0.130812, abs=1e-6)
    assert kl(row(math.log(3), 0), row(0, 0)).item() == pytest.approx(0.143841, abs=1e-6)
    student = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher = student.flip(0)
    expected = F.kl_div(F.log_softmax(student, -1), F.softmax(teacher, -1), reduction="batchmean")
    torch.testing.assert_close(kl(student, teacher).mean(), expected)


def test_hinge_active():
    """d_plus = 0.130812 (above), d_minus = KL of equal distributions = 0, so l_con = 0.130812 - 0 + 0.1."""
    found = l_con(row(0, 0), row(math.log(3), 0), row(0, 0), alpha=0.1)
    assert found.item() == pytest.approx(0.230812, abs=1e-6)


def test_hinge_inactive():
    """GM and OLD swapped: 0 - 0.130812 + 0.1 < 0, so the loss is 0 and nothing is learnt from it."""
    z = row(0, 0).requires_grad_()
    found = l_con(z, row(0, 0), row(math.log(3), 0), alpha=0.1)
    assert found.item() == 0
    assert (torch.autograd.grad(found, z)[0] == 0).all()


Z, GM, OLD = row(3, 4), row(0, 5), row(4, 3)


@pytest.mark.parametrize(
    ("loss", "distance", "expected"),
    [
        ("triplet", "kl", 0.117658),
        ("triplet", "cos", 0.46),
        ("triplet", "l2", 2.048064),
        ("triplet", "mse", 8.3),
        ("moon", "cos", 0.865893),
        ("regularizer", "kl", 0.279775),
        ("regularizer", "cos", 0.2),
        ("regularizer", "l2", 3.162278),
        ("regularizer", "mse", 10.0),
    ],
)
def test_the_nine_rows_of_table_10(loss, distance, expected):
    """PM (3, 4), GM (0, 5), OLD (4, 3), alpha = 0.3.

    cos(PM, GM) = 20/25 = 0.8, cos(PM, OLD) = 24/25 = 0.96: triplet 0.2 - 0.04 + 0.3, MOON ln(1 + e^{(0.96 - 0.8)/0.5}).
    ||PM - GM|| = sqrt(10) = 3.162278, ||PM - OLD|| = sqrt(2) = 1.414214; their squares are 10 and 2.
    KL: softmax of PM (0.268941, 0.731059), of GM (0.006693, 0.993307), of OLD that of PM swapped. GM to PM
    0.006693 ln(0.006693/0.268941) + 0.993307 ln(0.993307/0.731059) = -0.024720 + 0.304495; OLD to PM
    (0.731059 - 0.268941) ln(0.731059/0.268941) = 0.462117 * 1; triplet 0.279775 - 0.462117 + 0.3.
    """
    assert l_con(Z, GM, OLD, loss=loss, distance=distance, alpha=0.3).item() == pytest.approx(expected, abs=1e-6)


def test_moons_term():
    """cos(z, near) = 1, cos(z, far) = 0, tau = 0.5: -log(e^2 / (e^2 + 1)) = log(1 + e^-2) = 0.126928; no preference
    gives log 2."""
    assert contrast(row(2, 0), row(1, 0), row(0, 3)).item() == pytest.approx(0.126928, abs=1e-6)
    assert contrast(row(2, 0), row(1, 1), row(1, 1)).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("distance", [*DISTANCES, "moon"])
def test_gradients_are_finite_where_outputs_are_equal_or_zero(distance):
    for other in (row(0, 0), row(1, 2)):
        for z in (other.clone().requires_grad_(), row(0, 0).requires_grad_()):
            found = contrast(z, other, other) if distance == "moon" else DISTANCES[distance](z, other)
            assert torch.isfinite(torch.autograd.grad(found.sum(), z)[0]).all()
    assert cosine(row(0, 0), row(1, 2)).item() == 0
    assert [f(Z, Z).item() for f in (kl, cos, l2, mse)] == pytest.approx([0, 0, 0, 0], abs=1e-15)


def test_padding_does_not_count():
    """Two samples and one row of padding: (10 + 2) / 2 = 6 for the squared distances above."""
    z, other = torch.cat([Z, Z, Z]), torch.cat([GM, OLD, 100 * OLD])
    batch = make_batch(None, torch.tensor([0, 1, 0]), mask=[1, 1, 0])
    assert l_con(z, other, other, batch, loss="regularizer", distance="mse").item() == pytest.approx(6)
    positions = torch.tensor([[1, -1], [0, 2], [0, 1]])  # sequences: one of the two samples has one position only
    batch = make_batch(None, positions, mask=[1, 1, 0])
    values = torch.tensor([[1.0, 50.0], [2.0, 6.0], [50.0, 50.0]])
    assert batch_mean(values, batch).item() == pytest.approx((1 + 2 + 6) / 3)


def test_a_large_margin_never_clips():
    """Then the gradient of l_con is that of d_plus - d_minus."""
    draw = torch.Generator().manual_seed(1)
    z, gm, old = (torch.randn(6, 4, dtype=torch.float64, generator=draw) for _ in range(3))
    batch = make_batch(None, torch.zeros(6, dtype=torch.int64))
    z.requires_grad_()
    found = torch.autograd.grad(l_con(z, gm, old, batch, case="C", alpha=1e3), z)[0]
    expected = torch.autograd.grad(kl(z, gm).mean() - kl(z, old).mean(), z)[0]
    torch.testing.assert_close(found, expected)


# -- hypernetwork -----------------------------------------------------------------------------------------------------


def cnn(classes):
    """The paper's CNN for CIFAR (Table 2): 1,216 + 12,832 + 1,537,920 + 153,680 + 81 * classes parameters."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Conv2d(3, 16, 5), nn.Conv2d(16, 32, 5), nn.Linear(800, 1920), nn.Linear(1920, 80), nn.Linear(80, classes)
        )  # fmt: skip


def sized(classes):
    """A task with that model's parameters, and their number."""
    params = dict(cnn(classes).named_parameters())
    return SimpleNamespace(init=lambda key: params), sum(p.numel() for p in params.values())


@pytest.mark.parametrize(("classes", "total", "chunks", "last"), [(10, 1706458, 4267, 58), (100, 1713748, 4285, 148)])
def test_chunks_of_the_papers_models(classes, total, chunks, last):
    """4,266 chunks of 400 are 1,706,400 parameters; 4,284 are 1,713,600."""
    task, count = sized(classes)
    assert count == total
    assert method("pfedkt").hypernetwork.chunks(task) == (chunks, 400)
    assert total - (chunks - 1) * 400 == last
    made = dense.cut(torch.empty(chunks * 400, device="meta"), task.init(0))
    assert {k: v.shape for k, v in made.items()} == {k: v.shape for k, v in task.init(0).items()}


def test_sizes_of_the_papers_hypernetworks():
    """13*100 + 100, 100*100 + 100, 100*400 + 400: 51,900; a second hidden layer adds 10,100; the large one has
    1,400 + 10,100 + 101 * 1,706,458. FLOPs of the small one: 2 * (1,300 + 10,000 + 40,000) = 102,600."""
    task, _ = sized(10)
    widths = method("pfedkt").hypernetwork.widths(task)
    assert dense.count(widths) == 51_900
    assert 2 * sum(a * b for a, b in pairwise(widths)) == 102_600
    assert dense.count(method("pfedkt", n_hidden=2).hypernetwork.widths(task)) == 62_000
    assert dense.count(method("pfedkt", hn="large").hypernetwork.widths(task)) == 172_363_758
    assert method("pfedkt", hn="large").hypernetwork.chunks(task) == (1, 1706458)


def as_written(**settings):
    """The method with the paper's initial values and its single step."""
    return method("pfedkt", **{**dict(type(method("pfedkt")).variants["paper"]), **settings})


def three_chunks(**settings):
    """100 * 8 + 8 + 8 * 4 + 4 = 844 parameters: chunks of 400, 400 and 44."""
    return make_task(SIZES, data={"dim": 100}, **settings)


SIZES = (3, 17, 8, 11)


@pytest.mark.parametrize("clip", [50.0, 1.5])
def test_the_hypernetwork_step_of_a_model_of_three_chunks(clip):
    """A network called chunk by chunk, a backward pass of Delta = theta0 - omega, clip_grad_norm_ and SGD."""
    task, alg = three_chunks(), as_written(eta_hn=0.05, hn_clip=clip)
    down, state = alg.constants(task, 3), alg.init_client(task, 3, torch.tensor(11))
    assert down["E"].shape == (3, 13)
    net = dense_layers(state["varphi"])
    theta0 = torch.cat([net(down["E"][0]), net(down["E"][1]), net(down["E"][2])])[:844]
    found = nn.utils.parameters_to_vector(alg.hypernetwork.generate(task, state["varphi"], down).values())
    torch.testing.assert_close(found, theta0)
    omega = task.init(3)
    delta = theta0.detach() - nn.utils.parameters_to_vector(omega.values())
    theta0.backward(gradient=delta)
    norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
    assert 1.5 < norm < 50  # the smaller limit is reached, the larger one is not
    torch.optim.SGD(net.parameters(), lr=0.05).step()
    assert_near(single_step(alg, task, state["varphi"], omega, down), dense_values(net))


def test_the_hypernetwork_moves_towards_the_trained_model():
    """The sign of Delta: steps bring what it generates closer to omega."""
    task, alg = three_chunks(), as_written()
    down, omega = alg.constants(task, 3), task.init(3)
    gaps, varphi = [], alg.init_client(task, 3, torch.tensor(11))["varphi"]
    for _ in range(4):
        made = alg.hypernetwork.generate(task, varphi, down)
        gaps.append(sum(((made[k] - omega[k]) ** 2).sum().item() for k in omega))
        varphi = single_step(alg, task, varphi, omega, down)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.9 * gaps[0]


def test_hypernetworks_begin_as_torch_would_and_differ_while_embeddings_agree():
    """Uniform within 1/sqrt(inputs): variance 1/(3 inputs)."""
    run = SingleRun(as_written(train_emb=True), three_chunks(), 0, plan=EAGER)
    varphi = client_state(run, "varphi")
    for name, inputs in (("fc1", 13), ("fc2", 100), ("fc3", 100)):
        for kind in ("weight", "bias"):
            values = varphi[f"{name}.{kind}"]
            assert values.abs().max() <= 1 / math.sqrt(inputs)
            assert values.var().item() == pytest.approx(1 / (3 * inputs), rel=0.2)
            assert not torch.equal(values[0], values[1])
    assert not torch.equal(varphi["fc2.bias"][0], varphi["fc3.bias"][0][:100])
    assert torch.equal(varphi["E"][0], varphi["E"][1])
    fixed = SingleRun(method("pfedkt"), three_chunks(), 0, plan=EAGER).constants["E"]
    assert torch.equal(fixed, varphi["E"][0])
    assert not torch.equal(fixed, SingleRun(method("pfedkt"), three_chunks(), 1, plan=EAGER).constants["E"])


def test_generated_weights_begin_in_the_scale_of_their_layers():
    """fan_in: whatever the layer, the standard deviation of a generated tensor is that of its usual initial values up
    to sampling, and chunks have nothing in common; default: one scale for all, most of it common to all chunks."""
    task, wide = make_task(SIZES, data={"dim": 900}), nn.Linear(900, 8)
    for alg, is_usual in ((method("pfedkt"), True), (as_written(), False)):
        down = alg.constants(task, 3)
        varphi = alg.init_client(task, 3, torch.tensor(11))["varphi"]
        made = alg.hypernetwork.generate(task, varphi, down)
        std = made["first.weight"].std().item()
        assert (std == pytest.approx(wide.weight.std().item(), rel=0.15)) == is_usual
        chunks = dense.apply(varphi, down["E"])
        common = (chunks.mean(0) ** 2).mean() / (chunks**2).mean()
        assert common < 1e-20 if is_usual else common > 0.4


@pytest.mark.parametrize("update", ["fit", "line"])
@pytest.mark.parametrize("model", ["mlp", "cnn4", "cnn_kt"])
def test_the_hypernetwork_approaches_the_trained_model_in_every_round(model, update, monkeypatch):
    """||theta0 - omega|| after the hypernetwork learnt is less than before it, from the first round on, without
    clipping, whatever the number of chunks: 5, 1,456 and 4,267."""
    images = torch.randint(0, 256, (24, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels = torch.arange(24) % 3
    data = fedloom.federation(images.numpy(), labels.numpy(), clients=np.repeat([0, 1], 12))
    alg = method("pfedkt", hn_update=update, hn_steps=10 if model == "mlp" else 2)
    config = {"model": model, "lr": 0.01, "local_epochs": 1, "rounds": 2, "batch_size": 6, "plan": "per-client"}
    gaps = []

    finish = type(alg).finish

    def watched(self, task, work, down, state, info):
        kept, up = finish(self, task, work, down, state, info)
        gap = self.gap(task, up["w"], down)
        gaps.append((float(gap(state["varphi"])), float(gap(kept["varphi"]))))
        return kept, up

    monkeypatch.setattr(type(alg), "finish", watched)
    fedloom.run(alg, data, **config)
    assert len(gaps) >= 2 * 2
    assert all(after < before for before, after in gaps)


def test_the_papers_single_step_leads_away_where_there_are_many_chunks():
    """With 1,456 chunks the step size 0.005 is above 2/J: the reason for the other updates."""
    images = torch.randint(0, 256, (12, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    task_data = fedloom.federation(images.numpy(), np.arange(12) % 3, clients=np.repeat([0, 1], 6))
    config = from_keywords("pfedkt", task_data, {"model": "cnn4"})
    task = build_task(config, task_data)
    alg, omega = as_written(hn_clip=1e9), task.init(5)
    down, varphi = alg.constants(task, 3), alg.init_client(task, 3, torch.tensor(11))["varphi"]
    gap = alg.gap(task, omega, down)
    assert gap(single_step(alg, task, varphi, omega, down)) > 1.5 * gap(varphi)


# -- identities -------------------------------------------------------------------------------------------------------


def test_case_a_is_fedavg_with_its_optimiser():
    alg = method("pfedkt", case="A", local_momentum=0.8, local_decay=0.01)
    run, records = run_rounds(alg, make_task(RAGGED, participation=0.5, epochs=2), evaluate=True)
    task = make_task(RAGGED, participation=0.5, epochs=2, momentum=0.8, weight_decay=0.01)
    fedavg, expected = run_rounds(method("fedavg"), task, evaluate=True)
    assert_near(run.server, fedavg.server)
    assert run.store.everyone() == fedavg.store.everyone() == {"own": {}, "stats": {}}
    assert_same_scores(records, expected, tolerance=1e-12)


def test_pfedkt_has_its_own_momentum_and_weight_decay():
    plain, _ = run_rounds(method("pfedkt"), make_task(RAGGED))
    other, _ = run_rounds(method("pfedkt"), make_task(RAGGED, momentum=0.5, weight_decay=0.1))
    assert_equal(plain.server, other.server)


def test_case_b_is_the_method_without_its_contrastive_loss():
    task = make_task(RAGGED, participation=0.5)
    b, _ = run_rounds(method("pfedkt", case="B"), task)
    d, _ = run_rounds(method("pfedkt", mu=0.0), task)
    assert_near(b.server, d.server)
    assert_near(b.store.everyone(), d.store.everyone())


def test_case_c_starts_from_the_global_model_and_has_no_hypernetwork():
    """Without its loss it is case A; in the first round GM = OLD and only 1 - mu is left of the loss."""
    task = make_task(RAGGED)
    c, _ = run_rounds(method("pfedkt", case="C", mu=0.4), task)
    assert set(client_state(c)) == {"old"}
    assert c.constants == {}
    bare, _ = run_rounds(method("pfedkt", case="C", mu=0.0), task)
    a, _ = run_rounds(method("pfedkt", case="A"), task)
    assert_near(bare.server, a.server)
    assert not is_near(c.server, a.server, 1e-6)


@pytest.mark.parametrize(("mu", "matters"), [(0.0, False), (0.5, True)])
def test_without_its_weight_the_global_model_does_not_matter(mu, matters):
    def spoil(run):
        run.server = {"w": {k: -3 * v for k, v in run.server["w"].items()}}

    task, alg = make_task(RAGGED), method("pfedkt", mu=mu, alpha=5.0)
    plain, _ = run_rounds(alg, task)
    spoilt, _ = run_rounds(alg, task, after_round=spoil)
    assert is_near(plain.store.everyone(), spoilt.store.everyone()) != matters


@pytest.mark.parametrize("eta_hn", [0.0, 0.005])
def test_a_hypernetwork_without_steps_generates_the_same_model_in_every_round(eta_hn):
    task, alg = make_task(RAGGED), method("pfedkt", eta_hn=eta_hn)
    run = SingleRun(alg, task, 3, plan=EAGER)
    begun = client_state(run, "varphi")
    made = torch.func.vmap(lambda varphi: alg.hypernetwork.generate(task, varphi, run.constants))
    for _ in range(3):
        run.advance(evaluate=False)
        now = client_state(run, "varphi")
        assert is_equal(made(now), made(begun)) == (eta_hn == 0)


@pytest.mark.parametrize("loss", ["triplet", "moon"])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_where_gm_equals_old_the_contrastive_gradient_is_zero(alpha, loss):
    """As at a first participation in round 0: the gradient is 1 - mu = 1/2 of the supervised one, exactly."""
    task = make_task((9,), norm=True)
    alg = method("pfedkt", mu=0.5, alpha=alpha, loss=loss, distance="cos" if loss == "moon" else "kl")
    down = {**alg.init_server(task, 0), **alg.constants(task, 0)}
    info = SimpleNamespace(first=torch.tensor(True))
    work = alg.release(task, alg.begin(task, down, alg.init_client(task, 0, torch.tensor(5)), info), down, info)
    batch = make_batch(*client_samples(task, "train")[0])
    full, _ = task.grad(work["omega"], batch, loss=alg.complete_loss(task, work, batch, down))
    supervised, _ = task.grad(work["omega"], batch)
    for name in full:
        torch.testing.assert_close(full[name], supervised[name] / 2, rtol=0, atol=1e-16)


def test_frozen_models_keep_the_statistics_of_the_start_of_the_round():
    task, alg = make_task((9, 14), norm=True), method("pfedkt", mu=0.5)
    run, _ = run_rounds(alg, task, rounds=2)
    state, stats = client_state(run, i=1), running_statistics(run, "omega", 1)
    down = {**run.constants, **run.server}
    begun = alg.begin(task, down, state, None)
    work = alg.release(task, {**begun, "omega": begun["omega"]._replace(buffers=stats)}, down, None)
    batch = make_batch(*client_samples(task, "train")[1])
    for _ in range(3):
        work = alg.step(task, work, batch, down, None)
    assert_equal(work["statistics"], stats)
    assert not is_near(work["omega"].buffers, stats, 1e-6)
    assert_equal(work["old"], state["old"])


def test_a_client_that_never_trained_is_served_by_the_global_model():
    task = make_task(RAGGED, norm=True)
    _, records = run_rounds(method("pfedkt"), task, seed=0, cohorts=[(1, 4), (1, 7)], evaluate=True)
    scores, trained = records[-1].scores, [1, 4, 7]
    new = [i for i in range(len(RAGGED)) if i not in trained]
    np.testing.assert_allclose(scores["pre"]["test"][new], scores["global"]["test"][new])
    np.testing.assert_allclose(scores["post"]["test"][new], scores["global"]["test"][new])
    # those who trained use the model that they trained last, which is not the one they will start from
    assert not np.allclose(scores["pre"]["test"][trained], scores["global"]["test"][trained])
    np.testing.assert_allclose(scores["pre"]["test"][trained], scores["post"]["test"][trained])


def test_traffic_is_one_model_each_way():
    """6 * 8 + 8 + 8 * 4 + 4 = 92 parameters in float64, 12 clients; the embeddings are drawn on both sides."""
    done = run_rounds(method("pfedkt"), make_task(RAGGED), rounds=1)[1][0]
    assert (done.bytes_down, done.bytes_up) == (12 * 92 * 8, 12 * 92 * 8)


def test_moons_loss_needs_the_cosine():
    with user_error("distance=cos", "l2"):
        method("pfedkt", loss="moon", distance="l2").check(make_task(SIZES))
    method("pfedkt", loss="moon", distance="cos").check(make_task(SIZES))


def test_a_hypernetwork_too_large_for_memory_is_refused():
    """50 * 172,363,758 float32 values, each drawn from three 64-bit words: 28 bytes each, 241.3 GB."""
    task, _ = sized(10)
    task.clients, task.dtype, task.data = 50, torch.float32, SimpleNamespace(kind="classes")
    task.data.available_memory = lambda: 64 * 10**9
    with user_error("172,363,758 parameters (0.7 GB)", "50 clients takes 241.3 GB", "64.0 GB are free", "hn=small"):
        method("pfedkt", hn="large").check(task)
    for settings in ({}, {"hn": "large", "case": "C"}):
        method("pfedkt", **settings).check(task)
    task.data.available_memory = lambda: 242 * 10**9
    method("pfedkt", hn="large").check(task)


# -- stacked clients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"case": "A"},
        {"case": "C", "alpha": 5.0},
        {"loss": "moon", "distance": "cos"},
        {"loss": "triplet", "distance": "l2", "level": "feature"},
        {"loss": "regularizer", "distance": "mse"},
        {"hn": "large", "n_hidden": 0},
        {"train_emb": True, "hn_clip": 0.05, "hn_update": "step"},
        {"train_emb": True, "hn_update": "line"},
        {"hn_update": "end_to_end"},
    ],
    ids=str,
)
def test_every_variant_gives_the_same_stacked_and_client_by_client(settings):
    task = make_task((9, 2, 24), norm=True, dropout=0.2, lr=0.02)
    assert_same(method("pfedkt", mu=0.3, **settings), task, Plan("stacked", "traced", chunk=3, shrink=0), 1e-9)


@pytest.mark.parametrize("settings", [{}, {"loss": "moon", "distance": "cos", "level": "feature"}], ids=str)
def test_sequences_give_the_same_stacked_and_client_by_client(settings):
    assert_same(
        method("pfedkt", mu=0.4, alpha=5.0, **settings),
        token_task(),
        Plan("stacked", "traced", chunk=3, shrink=0),
        1e-9,
    )


def test_every_position_of_a_sequence_is_a_sample():
    """The loss of two padded sequences is that of their five known positions as samples of their own."""
    task, alg = token_task(), method("pfedkt", mu=0.4, alpha=5.0)
    x = torch.tensor([[0, 1, 2, 3], [4, 0, 1, 2], [1, 1, 1, 1]])
    y = torch.tensor([[1, 2, -1, -1], [3, 0, 4, -1], [0, 0, 0, 0]])
    batch = make_batch(x, y, mask=[1, 1, 0])
    slots = [task.slot(task.init(key)) for key in (0, 1, 2)]
    work, down = {"statistics": {}, "old": slots[2].params}, {"w": slots[1].params}
    found = alg.complete_loss(task, work, batch, down)(task.predict(slots[0], x), batch)
    z, gm, old = (task.predict(slot, x).logits[:2][y[:2] >= 0] for slot in slots)
    labels = y[:2][y[:2] >= 0]
    d_plus, d_minus = (
        F.kl_div(F.log_softmax(z, 1), F.softmax(teacher, 1), reduction="batchmean") for teacher in (gm, old)
    )
    assert z.shape == (5, 5)
    expected = 0.4 * (d_plus - d_minus + 5) + 0.6 * F.cross_entropy(z, labels)
    torch.testing.assert_close(found, expected)


# -- a second implementation ------------------------------------------------------------------------------------------

COHORTS = ((0, 1, 3), (1, 2), (0, 1, 2, 3))  # client 2 comes later, client 3 misses a round
LR, EPOCHS, SEED = 0.05, 3, 5


def usual(p):
    """For the values of a tensor: what is added to what the hypernetwork generates, and what that is multiplied by."""
    p = p.detach()
    shift, scale = 0.0, p.std(correction=0).item()
    if scale == 0:  # a normalisation layer, which begins with ones or zeros
        shift, scale = p.flatten()[0].item(), 1 / math.sqrt(3 * p.numel())
    return tuple(torch.full((p.numel(),), value, dtype=torch.float64) for value in (shift, scale))


class PlainClient:
    """A client of pFedKT with modules, optimisers and a loop over chunks. It is given its data, initial models, and
    the initial hypernetwork and embeddings."""

    def __init__(self, x, y, net, varphi, embeddings, settings):
        self.x, self.y, self.settings = x, y, settings
        self.old = copy.deepcopy(net)
        self.hn, self.chunks = None, None
        if varphi is not None:
            self.hn, self.chunks = dense_layers(varphi), nn.Parameter(embeddings.clone())
            self.learnt = [*self.hn.parameters(), *([self.chunks] if settings["train_emb"] else [])]
        self.shift, self.scale = torch.tensor(0.0), torch.tensor(1.0)
        if settings["hn_init"] == "fan_in":
            self.shift, self.scale = (torch.cat(parts) for parts in zip(*map(usual, net.parameters()), strict=True))

    def generated(self):
        """theta0 as a vector that can be differentiated."""
        size = sum(p.numel() for p in self.old.parameters())
        return self.shift + self.scale * torch.cat([self.hn(v) for v in self.chunks])[:size]

    def half_gap(self, omega):
        return ((self.generated() - omega) ** 2).sum() / 2

    def values(self):
        return [p.detach().clone() for p in self.learnt]

    def put(self, values):
        with torch.no_grad():
            for p, value in zip(self.learnt, values, strict=True):
                p.copy_(value)

    def absorb(self, omega):
        """The hypernetwork's update towards the trained model, a vector."""
        s, nearest = self.settings, (self.half_gap(omega).item(), self.values())
        size = self.generated().norm().item()
        self.hn.zero_grad()
        self.chunks.grad = None
        self.half_gap(omega).backward()
        if s["hn_update"] == "step":
            nn.utils.clip_grad_norm_(self.learnt, s["hn_clip"])
            return torch.optim.SGD(self.learnt, lr=s["eta_hn"]).step()
        start, gradients = self.values(), [p.grad.clone() for p in self.learnt]
        for power in range(-12, 9):
            self.put([p - s["eta_hn"] * 2.0**power * g for p, g in zip(start, gradients, strict=True)])
            nearest = min(nearest, (self.half_gap(omega).item(), self.values()), key=lambda pair: pair[0])
        self.put(nearest[1])
        if s["hn_update"] == "fit":
            lr = s["eta_hn"] * math.sqrt(2 * nearest[0]) / size
            optimizer = torch.optim.Adam(self.learnt, lr=lr)
            for k in range(s["hn_steps"]):
                optimizer.param_groups[0]["lr"] = lr * (1 - k / s["hn_steps"])
                optimizer.zero_grad()
                self.half_gap(omega).backward()
                optimizer.step()
                nearest = min(nearest, (self.half_gap(omega).item(), self.values()), key=lambda pair: pair[0])
        return self.put(nearest[1])

    def outputs(self, net):
        """Logits, and what is compared."""
        features = torch.tanh(net.norm(net.first(self.x)))
        logits = net.head(features)
        return logits, features if self.settings["level"] == "feature" else logits

    def distance(self, z, teacher):
        if self.settings["distance"] == "kl":
            return F.kl_div(F.log_softmax(z, 1), F.softmax(teacher, 1), reduction="batchmean")
        if self.settings["distance"] == "cos":
            return (1 - F.cosine_similarity(z, teacher, dim=1)).mean()
        squares = ((z - teacher) ** 2).sum(1)
        return (squares if self.settings["distance"] == "mse" else squares.sqrt()).mean()

    def contrastive(self, z, gm, old):
        if self.settings["loss"] == "moon":
            pair = torch.stack([F.cosine_similarity(z, gm, dim=1), F.cosine_similarity(z, old, dim=1)], 1)
            return F.cross_entropy(pair / 0.5, torch.zeros(len(z), dtype=torch.int64))
        pull = self.distance(z, gm)
        if self.settings["loss"] == "regularizer":
            return pull
        return torch.clamp(pull - self.distance(z, old) + self.settings["alpha"], min=0)

    def round(self, w):
        """Trains on the global parameters w; returns the trained model."""
        s = self.settings
        gm = copy.deepcopy(self.old)  # with this client's running statistics
        with torch.no_grad():
            for p, value in zip(gm.parameters(), w, strict=True):
                p.copy_(value)
        old, net = self.old.eval(), copy.deepcopy(gm)
        gm.eval()
        if self.hn is not None:
            nn.utils.vector_to_parameters(self.generated().detach().clone(), net.parameters())
        net.train()
        sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=5e-5)
        through = self.hn is not None and s["hn_update"] == "end_to_end"
        adam = torch.optim.Adam(self.learnt, lr=s["eta_hn"]) if through else None
        mu = s["mu"] if s["case"] in "CD" else 0.0
        for _ in range(EPOCHS):
            sgd.zero_grad()
            logits, z = self.outputs(net)
            loss = (1 - mu) * F.cross_entropy(logits, self.y)
            if mu:
                with torch.no_grad():
                    teachers = self.outputs(gm)[1], self.outputs(old)[1]
                loss = loss + mu * self.contrastive(z, *teachers)
            loss.backward()
            if not through:
                sgd.step()
                continue
            adam.zero_grad()
            g = torch.cat([(p.grad + 5e-5 * p.detach()).flatten() for p in net.parameters()])
            self.generated().backward(gradient=g)
            adam.step()
            nn.utils.vector_to_parameters(self.generated().detach().clone(), net.parameters())
        if self.hn is not None and not through:
            self.absorb(nn.utils.parameters_to_vector(net.parameters()).detach())
        self.old = copy.deepcopy(net)
        return net


BASE = {
    "hn_init": "default", "hn_update": "step", "hn_steps": 60, "local_clip": None,
    "case": "D", "mu": 0.3, "alpha": 0.1, "loss": "triplet", "distance": "kl", "level": "logits", "hn": "small",
    "emb_dim": 13, "n_hidden": 1, "eta_hn": 0.05, "hn_clip": 50.0, "train_emb": False,
}  # fmt: skip
VARIANTS = [
    *({"case": case} for case in "ABCD"),
    {"alpha": 0.0},
    *({"loss": "triplet", "distance": distance, "alpha": 2.0} for distance in ("kl", "cos", "l2", "mse")),
    *({"loss": "regularizer", "distance": distance} for distance in ("kl", "cos", "l2", "mse")),
    {"loss": "moon", "distance": "cos"},
    {"level": "feature"},
    {"train_emb": True, "hn_clip": 0.5},
    {"hn": "large", "n_hidden": 2, "emb_dim": 6},
    {"hn_init": "fan_in"},
    {"hn_init": "fan_in", "hn_update": "fit", "hn_steps": 7},
    {"hn_init": "fan_in", "hn_update": "line", "train_emb": True},
    {"hn_init": "fan_in", "hn_update": "end_to_end", "eta_hn": 0.01},
]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_pfedkt_against_plain_pytorch(variant, norm):
    """Batches hold all samples of a client, so that their order does not matter; rounds, clients of different sizes,
    late and missed participations, momentum, decay and statistics do."""
    settings = {**BASE, **variant}
    task = full_batch_task(SIZES, norm=norm, data={"dim": 100}, lr=LR, epochs=EPOCHS)
    run = SingleRun(method("pfedkt", **settings), task, SEED, plan=PER_CLIENT)
    net = SmallNet(100, 8, 4, norm=norm).double()
    net.load_state_dict({**net.state_dict(), **run.server["w"]})
    clients = []
    for i, (x, y) in enumerate(client_samples(task, "train")):
        varphi = client_state(run, i=i).get("varphi")
        embeddings = None if varphi is None else {**run.constants, **varphi}["E"]
        clients.append(PlainClient(x, y, net, varphi, embeddings, settings))
    w = [p.detach().clone() for p in net.parameters()]
    names = [name for name, _ in net.named_parameters()]
    for cohort in COHORTS:
        run.advance(evaluate=False, cohort=np.array(cohort))
        models = [list(clients[i].round(w).parameters()) for i in cohort]
        share = [SIZES[i] / sum(SIZES[j] for j in cohort) for i in cohort]
        w = [sum(a * p.detach() for a, p in zip(share, ps, strict=True)) for ps in zip(*models, strict=True)]
        for name, p in zip(names, w, strict=True):
            assert_near(run.server["w"][name], p, 1e-9)
    for i, client in enumerate(clients):
        if settings["case"] != "A":
            assert_near(client_state(run, "old", i), values(client.old), 1e-9)
        if client.hn is not None:
            embeddings = {"E": client.chunks.detach()} if settings["train_emb"] else {}
            assert_near(client_state(run, "varphi", i), {**dense_values(client.hn), **embeddings}, 1e-9)


def test_the_second_implementation_has_hinges_of_both_kinds():
    """Without a margin some of its losses are positive and some are clipped, so the comparison sees both."""
    task = full_batch_task(SIZES, data={"dim": 100}, lr=LR, epochs=EPOCHS)
    seen = []

    class Watched(type(method("pfedkt"))):
        def contrastive(self, *args):
            seen.append(float(super().contrastive(*args).detach()))
            return super().contrastive(*args)

    run_and_evaluate(Watched(**{**BASE, "alpha": 0.0}), task, PER_CLIENT)
    late = seen[len(SIZES) * EPOCHS :]  # in the first round GM = OLD
    assert min(late) == 0 < max(late)
