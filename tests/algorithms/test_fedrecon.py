"""FedRECON: support and query samples, heads that are rebuilt, pseudo-clients, and a second implementation."""

import zlib

import numpy as np
import pytest
import torch.nn.functional as F
from helpers import EAGER, RAGGED, client_state, logreg_task, make_task, method, run_rounds
from oracles import assert_equal, assert_near, assert_scores, average, full_batch_run, net_of, part, plus, score
from sentences import user_error

from fedloom.core.algorithm import Draw
from fedloom.core.tree import leaves
from fedloom.studies.build import check

SIZES = (3, 17, 8, 1)


def support_and_query(run, samples, i, share):
    """Support and query samples of client i."""
    (x, y), n = samples, len(samples[1])
    order = np.random.default_rng([run.seed, zlib.crc32(b"recon"), i]).permutation(n)  # spec 0.10
    support, query = np.split(order, [max(1, int(share * n))])
    return (x[support], y[support]), (x[query], y[query])


@pytest.mark.parametrize("stateful", [False, True])
def test_fedrecon_against_plain_pytorch(stateful):
    """Learning rates of their own, the client with one sample has nothing to train the body with; PM_post is the pair
    that was trained, PM_pre a head rebuilt on the newest body."""
    settings = {"support": 0.3, "recon_epochs": 3, "query_epochs": 2, "recon_lr": 0.5, "query_lr": 0.2, "eta_g": 0.4}
    run, plain = full_batch_run(method("fedrecon", stateful=stateful, **settings), SIZES, EAGER, momentum=0.0)
    parts = [support_and_query(run, plain.train[i], i, 0.3) for i in plain.clients]
    w, heads = plain.initial, [part(plain.initial, "head.")] * len(SIZES)

    def rebuilt(w, i):
        return plain.fit(w | heads[i], parts[i][0], epochs=3, lr=0.5, only="head.")

    for _ in range(3):
        ends = []
        for i in plain.clients:
            query = parts[i][1]
            end = plain.fit(rebuilt(w, i), query, epochs=2 if len(query[1]) else 0, lr=0.2, only="first.")
            ends.append(end)
            if stateful:
                heads[i] = part(end, "head.")
        w = w | part(plus(w, plus(average(ends, SIZES), w, -1), 0.4), "first.")
        scores = run.advance().scores
    assert_near(run.server["phi"], part(w, "first."))
    assert_scores(scores["post"]["test"], ends, plain.test)
    assert_scores(scores["pre"]["test"], [rebuilt(w, i) for i in plain.clients], plain.test)
    if not stateful:
        assert leaves(client_state(run)) == []
        return
    for i in plain.clients:
        assert_near(client_state(run, "h", i), heads[i])


def test_fedrecon_divides_a_clients_samples_once():
    alg = method("fedrecon")
    for n, few in ((1, 1), (2, 1), (9, 1), (19, 1), (20, 2), (30, 3), (70, 7), (290, 29)):
        support, query = alg.divided(n, Draw(seed=3, i=4, t=0))
        assert len(support) == few
        assert sorted([*support, *query]) == list(range(n))
        again = alg.divided(n, Draw(seed=3, i=4, t=9))
        assert np.array_equal(support, again[0])
        assert np.array_equal(query, again[1])
    assert not np.array_equal(alg.divided(70, Draw(3, 5, 0))[0], alg.divided(70, Draw(3, 4, 0))[0])
    assert len(method("fedrecon", support=0.29).divided(100, Draw(3, 4, 0))[0]) == 29  # although 0.29 * 100 < 29


def test_fedrecon_without_query_epochs_leaves_the_body():
    task = make_task(RAGGED)
    run, _ = run_rounds(method("fedrecon", query_epochs=0), task)
    assert_equal(run.server["phi"], task.body(task.init(run.key)))


def test_a_client_with_one_sample_adds_nothing_to_fedrecons_body():
    task = make_task((1, 1, 1))
    run, records = run_rounds(method("fedrecon"), task, evaluate=True)
    assert_equal(run.server["phi"], task.body(task.init(run.key)))
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()


def test_fedrecon_is_refused_for_a_single_layer():
    with user_error("fedrecon", "single layer", "use another model"):
        check(method("fedrecon"), logreg_task(RAGGED, dim=6, classes=4))


def pseudo_client_order(n):
    """The order in which the server's n samples are divided among pseudo-clients."""
    return np.random.default_rng([0, zlib.crc32(b"partition"), zlib.crc32(b"pseudo-clients")]).permutation(n)


@pytest.mark.parametrize(("server", "count", "size"), [(50, 5, 10), (53, 5, 10), (7, 3, 2), (3, 1, 3)])
def test_fedrecon_is_tested_by_pseudo_clients_that_rebuild_a_head(server, count, size):
    """`count` equal parts of D_CS, drawn once; floor(0.7 * 0.5 * size) samples, one at least, are the support."""
    alg = method("fedrecon", support=0.5, recon_epochs=3, recon_lr=0.5, pseudo_clients=5 if count == 5 else 25)
    run, plain = full_batch_run(alg, SIZES, EAGER, momentum=0.0, data={"server": server})
    run.advance()
    record, data = run.advance(), run.task.data
    rows = data.server[pseudo_client_order(server)]
    w, few, total, shares = plain.initial | run.server["phi"], max(1, int(0.35 * size)), np.zeros(3), []
    for j in range(count):
        support, query = rows[j * size :][:few], rows[j * size : (j + 1) * size][few:]
        rebuilt = plain.fit(w, (data.x[support], data.y[support]), epochs=3, lr=0.5, only="head.")
        found = score(rebuilt, (data.x[query], data.y[query]))
        shares.append(found[0] / found[2])
        total += found
    assert record.server == pytest.approx(total)
    assert record.server[0] / record.server[2] == pytest.approx(np.mean(shares))
    assert "global" not in record.scores  # a body alone predicts nothing


@pytest.mark.parametrize("server", [0, 1])
def test_without_two_samples_at_the_server_fedrecon_is_not_tested_there(server):
    _, records = run_rounds(method("fedrecon"), make_task(SIZES, data={"server": server}), rounds=1, evaluate=True)
    assert records[-1].server is None


def test_pseudo_clients_start_from_the_servers_running_statistics():
    task = make_task((8, 20), norm=True, data={"server": 12})
    run, records = run_rounds(method("fedrecon", recon_epochs=0, pseudo_clients=2), task, evaluate=True)
    net = net_of({**task.init(run.key), **run.server["phi"], **run.stats["w"]}, norm=True).eval()
    order = pseudo_client_order(12)
    tested = task.data.server[np.concatenate([order[1:6], order[7:12]])]  # of six each, the first is the support
    logits = net(task.data.x[tested]).detach()
    loss = F.cross_entropy(logits, task.data.y[tested], reduction="sum")
    assert records[-1].server[1:] == pytest.approx([float(loss), 10])


def test_pseudo_clients_skip_a_batch_of_one_sample_under_batchnorm():
    """Everybody's support is one sample, so it does not matter how often a head is trained on it."""
    task, scores = make_task((8, 9), norm=True, data={"server": 12}), []
    for epochs in (0, 4):
        alg = method("fedrecon", recon_epochs=epochs, query_epochs=0, pseudo_clients=2)
        _, records = run_rounds(alg, task, rounds=1, evaluate=True)
        scores.append(records[0].server)
    assert np.isfinite(scores[1]).all()
    np.testing.assert_allclose(scores[0], scores[1])
