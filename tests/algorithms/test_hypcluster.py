"""HypCluster: who chooses which model, the average of each cluster, identities, and a second implementation."""

import math

import numpy as np
import pytest
import torch
from helpers import (
    EAGER,
    RAGGED,
    SingleRun,
    client_info,
    logreg_task,
    make_federation,
    make_task,
    method,
    run_rounds,
    tensor,
)
from oracles import (
    EVERY_SETTING,
    assert_equal,
    assert_near,
    assert_same_scores,
    assert_scores,
    average,
    full_batch_run,
    is_equal,
    measure,
)
from sentences import user_error

import fedloom
from fedloom.config.resolve import configure
from fedloom.core.federation import Federation, Ragged
from fedloom.core.tree import take
from fedloom.studies.build import check

SIZES = (3, 17, 8, 11)


@pytest.mark.parametrize("settings", [{}, EVERY_SETTING], ids=["defaults", "every setting"])
def test_hypcluster_with_one_model_is_fedavg(settings):
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    run, records = run_rounds(method("hypcluster", Kc=1), task, evaluate=True)
    fedavg, expected = run_rounds(method("fedavg"), task, evaluate=True)
    assert_near(take(run.server["models"], 0), fedavg.server["w"])
    assert_same_scores(records, expected, ["pre", "post"])


def test_hypclusters_models_start_from_different_values_and_the_first_from_fedavgs():
    task = make_task(SIZES)
    models = method("hypcluster", Kc=3).init_server(task, 77)["models"]
    assert_equal(take(models, 0), task.init(77))
    assert not any(is_equal(take(models, a), take(models, b)) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_hypcluster_against_plain_pytorch():
    """Two clients label otherwise than the other two, so that not all choose the same."""
    data = make_federation(SIZES)
    for i in (1, 2):
        rows = data.splits["train"][i]
        data.y[rows] = (data.y[rows] + 1) % 4
    run, plain = full_batch_run(method("hypcluster", Kc=3), federation=data)
    models = [take(run.server["models"], j) for j in range(3)]
    assert_equal(models[0], plain.initial)
    chosen = []

    def best(i):
        return int(np.argmin([measure(m, plain.train[i])[1] for m in models]))

    for _ in range(4):
        picks = [best(i) for i in plain.clients]
        states = [plain.fit(models[j], plain.train[i]) for i, j in enumerate(picks)]
        for j in range(3):
            members = [i for i in plain.clients if picks[i] == j]
            if members:
                models[j] = average([states[i] for i in members], [SIZES[i] for i in members])
        done = run.advance()
        assert done.reports["cluster"].tolist() == picks
        assert_scores(done.scores["post"]["test"], states, plain.test)
        newest = [models[best(i)] for i in plain.clients]
        assert_scores(done.scores["pre"]["test"], newest, plain.test)
        chosen += picks
        for j in range(3):
            assert_near(take(run.server["models"], j), models[j])
    assert len(set(chosen)) > 1


def test_hypclusters_average_is_over_those_who_chose_the_model():
    """(1 * 2 + 2 * 8) / 3 = 6 by clients 0 and 2; client 1 alone gives 5; nobody chose the third, which stays 7."""
    alg = method("hypcluster", Kc=3)
    up = {"w": {"p": tensor([2, 5, 8])}, "j": torch.tensor([0, 1, 0])}
    info = client_info()._replace(n=torch.tensor([1, 3, 2]))
    server = alg.aggregate(make_task((4, 4)), {"models": {"p": tensor([9, 9, 7])}}, up, info, 0, 0)
    assert server["models"]["p"].tolist() == pytest.approx([6, 5, 7])


def test_a_client_that_diverges_spoils_only_the_model_of_its_cluster():
    alg = method("hypcluster", Kc=2)
    up = {"w": {"p": tensor([math.nan, 5, 8])}, "j": torch.tensor([0, 1, 1])}
    info = client_info()._replace(n=torch.tensor([1, 1, 1]))
    server = alg.aggregate(make_task((4, 4)), {"models": {"p": tensor([9, 9])}}, up, info, 0, 0)
    assert server["models"]["p"][1] == 6.5
    task = make_task(SIZES)
    run = SingleRun(alg, task, 0, plan=EAGER)
    run.server["models"]["head.bias"][0] = math.nan
    assert run.advance(evaluate=False).reports["cluster"].tolist() == [1] * len(SIZES)


def test_hypcluster_chooses_by_all_samples_of_a_client():
    """150 samples are three batches of a pass that measures. The first and the last speak for one model (40 of 64, all
    of 22), all together for the other (88 of 150)."""
    data = make_federation((150, 20))
    task = make_task((), federation=data)
    run = SingleRun(method("hypcluster"), task, 0, plan=EAGER)
    rows = data.splits["train"][0]
    for j, bias in ((0, 20.0), (1, -20.0)):  # models that say class 0, or anything else
        run.server["models"]["head.weight"][j] = 0
        run.server["models"]["head.bias"][j] = tensor([bias, 0, 0, 0])
    data.y[rows] = ((torch.arange(150) >= 40) & (torch.arange(150) < 128)).long()
    losses = [measure(take(run.server["models"], j), (data.x[rows], data.y[rows]))[1] for j in range(2)]
    assert losses[1] < losses[0]
    assert run.advance(evaluate=False).reports["cluster"][0] == 1


def test_hypcluster_tells_groups_apart_that_label_in_opposite_ways():
    """Clients 0 to 3 have label sign(x), clients 4 to 7 the opposite: no single model serves both."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(8 * 45, 6))
    y = (x[:, 0] > 0).astype(np.int64)
    y[4 * 45 :] = 1 - y[4 * 45 :]
    parts = {"train": (0, 30), "val": (30, 30), "test": (30, 45)}
    splits = {s: Ragged.of([np.arange(45 * i + a, 45 * i + b) for i in range(8)]) for s, (a, b) in parts.items()}
    data = Federation(torch.tensor(x), torch.tensor(y), 2, splits, dtype=torch.float64)
    task = make_task((), federation=data, lr=0.5, epochs=2, rounds=15)
    accuracy = {}
    for name in ("hypcluster", "fedavg"):
        _, records = run_rounds(method(name), task, rounds=15, evaluate=True)
        right = records[-1].scores["pre"]["test"]
        accuracy[name] = right[:, 0].sum() / right[:, 2].sum()
        if name == "hypcluster":
            cluster = records[-1].reports["cluster"]
    assert len(set(cluster[:4])) == len(set(cluster[4:])) == 1
    assert cluster[0] != cluster[4]
    assert accuracy["hypcluster"] > 0.9
    assert accuracy["fedavg"] < 0.65


def test_hypcluster_refuses_models_that_all_start_alike():
    task = logreg_task(SIZES, dim=6, classes=4)  # logistic regression starts at zero
    with user_error("hypcluster", "start from different values", "Kc=1"):
        check(method("hypcluster"), task)
    check(method("hypcluster", Kc=1), task)
    with user_error("hypcluster", "give it as a function"):
        given = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))  # everybody starts from its values
        fedloom.run("hypcluster", rounds=1, clients=4, model=given, head="1")
    with user_error("Kc must be at least 1"):
        configure("hypcluster", values={"Kc": 0})
