"""With differential privacy, a site sends a noisy upload and nothing else that depends on its data."""

import json

import pytest
import torch
from federations import Federated, advance

from fedloom.config.keywords import from_keywords
from fedloom.core.errors import UserError
from fedloom.core.privacy import UploadPrivacy
from fedloom.core.tree import leaves
from fedloom.federation.host import Host
from fedloom.federation.kinds import REPLY
from fedloom.federation.links import InProcess
from fedloom.federation.messages import decode
from fedloom.federation.serve import Server, Terms
from fedloom.federation.site_privacy import ACCOUNT, SECRET

PRIVACY = {"dp_clip": 0.5, "dp_noise": 0.2}


def run(folder, local=None, **settings):
    config = from_keywords("fedrep", "digits", {"clients": 3, "rounds": 3, "device": "cpu", **PRIVACY, **settings})
    mine = {"dataset": "digits", "device": "cpu"}
    link = InProcess({i: Host(i, folder / f"site-{i}", {**mine, **(local or {})}) for i in range(3)})
    return Server(link, Terms(repeats=0)).run(config, out=folder / "run"), link


def test_scores_and_counts_are_withheld(tmp_path):
    result, link = run(tmp_path)
    replies = [reply for _, _, answer in link.log if (reply := decode(answer)).kind == REPLY]
    assert replies
    for reply in replies:
        for one in reply["results"]:
            assert not any(v for each in one["scores"].values() for row in each.values() for v in row)
            assert one.get("n", 1) == 1
            assert not any(one.get("computed", [0]))
    assert [row["epsilon"] for row in result.rounds] == [UploadPrivacy(0.5, 0.2).epsilon(t) for t in (1, 2, 3)]
    assert not [name for name in result.last() if "acc" in name or "loss" in name]


def test_a_site_keeps_its_own_scores_and_model(tmp_path):
    run(tmp_path)
    (folder,) = (tmp_path / "site-1").iterdir()
    lines = [json.loads(line) for line in (folder / "reports.jsonl").read_text().splitlines()]
    assert sum("pre" in line for line in lines) == 3
    assert lines[-1]["pre"]["test"][2] > 0
    assert (folder / SECRET).stat().st_mode & 0o777 == 0o600
    assert len((folder / ACCOUNT).read_text().splitlines()) == 3


def test_nobody_who_knows_the_seed_knows_the_noise(tmp_path):
    """Two federations with the same seed and data upload different things."""
    uploads = []
    for name in ("a", "b"):
        _, link = run(tmp_path / name)
        replies = (decode(answer) for i, _, answer in link.log if i == 0)
        uploads.append(next(reply.tree("up") for reply in replies if reply.kind == REPLY))
    for a, b in zip(*map(leaves, uploads), strict=True):
        assert not (a == b).any()


def test_an_upload_that_is_asked_for_again_is_the_same_and_counts_once(tmp_path):
    federated = Federated("fedavg", tmp_path, privacy=UploadPrivacy(0.5, 1.0))
    advance(federated.server)
    i, order, answer = federated.link.log[0]
    federated.restart()
    again = federated.sites[i].handle(decode(order))
    for a, b in zip(leaves(again.tree("up")), leaves(decode(answer).tree("up")), strict=True):
        assert torch.equal(a, b)
    trained_ahead = 2  # for the next round, too
    assert federated.sites[i].privacy.epsilon == UploadPrivacy(0.5, 1.0).epsilon(trained_ahead)


def test_a_site_stops_where_its_limit_is(tmp_path):
    limit = UploadPrivacy(0.5, 0.2).epsilon(2)
    with pytest.raises(UserError, match="Round 3 needs 3 replies and has 0"):
        run(tmp_path, {"max_epsilon": limit + 0.1})
    assert "this site gives away" in (tmp_path / "run" / "run.log").read_text()
    with pytest.raises(UserError, match="but the run has no differential privacy"):
        run(tmp_path / "none", {"max_epsilon": 3.0}, dp_clip=None, dp_noise=None)
