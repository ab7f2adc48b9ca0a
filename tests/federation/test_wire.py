"""Nothing leaves a site but what is declared."""

import numpy as np
import pytest
import torch
from federations import Federated, advance, variants
from helpers import methods

from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.tree import leaves
from fedloom.deployment.kinds import REPLY
from fedloom.deployment.messages import decode

CASES = [*((name, {}) for name in methods()), *variants()]
FIELDS = {"run", "client", "t", "results"}
NUMBERS = {"train": {"scores", "n", "computed"}, "evaluate": {"scores"}}


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_reply_has_the_uploads_of_the_method_and_the_numbers_of_all_methods(name, settings, tmp_path):
    federated = Federated(name, tmp_path, settings=settings)
    for _ in range(3):
        advance(federated.server)
    sent = set()
    for i, order, answer in federated.link.log:
        asked, reply = decode(order), decode(answer)
        assert reply.kind == REPLY
        assert set(reply.fields) == FIELDS
        assert (reply["run"], reply["client"], reply["t"]) == ("run", i, asked["t"])
        sizes = federated.task.data.splits
        for job, result in zip(asked["jobs"], reply["results"], strict=True):
            assert set(result) == NUMBERS[job["job"]]
            for view, found in result["scores"].items():
                assert view in ("pre", "post", "global")
                assert all(len(row) == 3 and row[2] == sizes[split].sizes[i] for split, row in found.items())
        assert set(reply.trees) <= {"up"}
        sent |= set(reply.trees.get("up", {}))
    assert sent <= set(federated.alg.uploads)


def test_every_upload_that_is_declared_is_sent_by_some_setting(tmp_path):
    sent: dict[str, set[str]] = {}
    for number, (name, settings) in enumerate(CASES):
        federated = Federated(name, tmp_path / str(number), settings=settings)
        advance(federated.server)
        answers = (decode(answer) for _, _, answer in federated.link.log)
        sent.setdefault(name, set()).update(*(reply.trees.get("up", {}) for reply in answers))
    assert sent == {name: set(ALGORITHMS[name].uploads) for name in methods()}


@pytest.mark.parametrize("name", methods())
def test_class_counts_never_leave_a_site(name, tmp_path):
    """Neither the counts nor the shares of classes are part of any tensor that a site sends."""
    federated = Federated(name, tmp_path)
    advance(federated.server)
    counts = federated.task.data.counts(np.arange(len(federated.sites))).double()
    for i, _, answer in federated.link.log:
        for tensor in leaves(dict(decode(answer).trees)):
            flat = tensor.double().flatten()
            if flat.numel() >= len(counts[i]):
                windows = flat.unfold(0, len(counts[i]), 1)
                assert not (windows == counts[i]).all(1).any()
                assert not torch.isclose(windows, counts[i] / counts[i].sum()).all(1).any()


def test_an_upload_that_is_not_declared_is_refused_by_the_site(tmp_path, monkeypatch, caplog):
    from fedloom.core.errors import UserError

    federated = Federated("ditto", tmp_path, repeats=0)
    monkeypatch.setattr(type(federated.alg), "uploads", {"other": "something else"})
    with pytest.raises(UserError, match="needs 3 replies and has 0"):
        advance(federated.server)
    assert "ditto would send 'w', which its class does not declare, so nothing was sent" in caplog.text
    assert not any(b'"up"' in answer for _, _, answer in federated.link.log)
