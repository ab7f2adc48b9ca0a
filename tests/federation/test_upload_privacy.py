"""With differential privacy, a site sends a noisy upload and nothing else that depends on its data."""

import json

import numpy as np
import pytest
import torch
from federations import Federated, advance

from fedloom.config.keywords import from_keywords
from fedloom.core.errors import UserError
from fedloom.core.privacy import UploadPrivacy, total_epsilon
from fedloom.core.tree import leaves, tree_map
from fedloom.deployment.host import Host
from fedloom.deployment.kinds import REPLY
from fedloom.deployment.links import InProcess
from fedloom.deployment.messages import decode
from fedloom.deployment.own_data import make_schema
from fedloom.deployment.serve import Server, Terms
from fedloom.deployment.site_privacy import ACCOUNT, SECRET, SiteAccount
from fedloom.engine.privacy import secret_noise

PRIVACY = {"dp_clip": 0.5, "dp_noise": 0.2}


def run(folder, local=None, out="run", terms=None, **settings):
    config = from_keywords("fedrep", "digits", {"clients": 3, "rounds": 3, "device": "cpu", **PRIVACY, **settings})
    mine = {"dataset": "digits", "device": "cpu"}
    link = InProcess({i: Host(i, folder / f"site-{i}", {**mine, **(local or {})}) for i in range(3)})
    return Server(link, terms or Terms(repeats=0)).run(config, out=folder / out), link


def replies_of(link):
    return [reply for _, _, answer in link.log if (reply := decode(answer)).kind == REPLY]


def test_scores_and_counts_are_withheld(tmp_path):
    result, link = run(tmp_path)
    assert replies_of(link)
    for reply in replies_of(link):
        for one in reply["results"]:
            assert not any(v for each in one["scores"].values() for row in each.values() for v in row)
            assert one.get("n", 1) == 1
            assert not any(one.get("computed", [0]))
    assert [row["epsilon"] for row in result.rounds] == [UploadPrivacy(0.5, 0.2).epsilon(t) for t in (1, 2, 3)]
    assert not [name for name in result.last() if "acc" in name or "loss" in name]


def test_a_site_keeps_its_own_scores_and_model(tmp_path):
    run(tmp_path)
    folder = next(path for path in (tmp_path / "site-1").iterdir() if path.is_dir())
    lines = [json.loads(line) for line in (folder / "reports.jsonl").read_text().splitlines()]
    assert sum("pre" in line for line in lines) == 3
    assert lines[-1]["pre"]["test"][2] > 0
    assert (tmp_path / "site-1" / SECRET).stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / "site-1" / ACCOUNT).read_text().splitlines()) == 3


def test_nobody_who_knows_the_seed_knows_the_noise(tmp_path):
    """Two federations with the same seed and data upload different things."""
    uploads = []
    for name in ("a", "b"):
        _, link = run(tmp_path / name)
        replies = (decode(answer) for i, _, answer in link.log if i == 0)
        uploads.append(next(reply.tree("up") for reply in replies if reply.kind == REPLY))
    for a, b in zip(*map(leaves, uploads), strict=True):
        assert not (a == b).any()


# -- the account


def test_an_upload_that_is_asked_for_again_is_the_same_and_counts_once(tmp_path):
    federated = Federated("fedavg", tmp_path, privacy=UploadPrivacy(0.5, 1.0))
    advance(federated.server)
    i, order, answer = federated.link.log[0]
    federated.restart()
    again = federated.sites[i].handle(decode(order))
    for a, b in zip(leaves(again.tree("up")), leaves(decode(answer).tree("up")), strict=True):
        assert torch.equal(a, b)
    trained_ahead = 2  # for the next round, too
    assert federated.sites[i].account.epsilon == UploadPrivacy(0.5, 1.0).epsilon(trained_ahead)


def test_another_order_for_the_same_round_has_other_noise_also_if_the_update_is_the_same(tmp_path):
    """Else a server that sends what leads to no update twice would see whether there was one."""
    federated = Federated("fedavg", tmp_path, privacy=UploadPrivacy(0.5, 1.0))
    site, noises = federated.sites[0], []
    advance(federated.server)
    order = decode(next(order for i, order, _ in federated.link.log if i == 0))
    other = tree_map(lambda v: v + 1e-3, order.tree("shared"))
    for shared in (order.tree("shared"), other, order.tree("shared")):
        before = site.account.noise

        def noise(digest, before=before):
            made = before(digest)
            noises.append(made(torch.tensor([0]), 0, torch.zeros(1, 9, dtype=torch.float64)))
            return made

        site.account.noise = noise
        site.handle(type(order)(order.kind, order.fields, {**order.trees, "shared": shared}))
        site.account.noise = before
    assert torch.equal(noises[0], noises[2])
    assert not (noises[0] == noises[1]).any()


def test_a_site_stops_where_its_limit_is(tmp_path):
    limit = UploadPrivacy(0.5, 0.2).epsilon(2)
    with pytest.raises(UserError, match="Round 3 needs 3 replies and has 0"):
        run(tmp_path, {"max_epsilon": limit + 0.1})
    assert "this site gives away" in (tmp_path / "run" / "run.log").read_text()
    with pytest.raises(UserError, match="but the run has no differential privacy"):
        run(tmp_path / "none", {"max_epsilon": 3.0}, dp_clip=None, dp_noise=None)


def test_the_limit_is_for_all_runs_together(tmp_path):
    """Neither another name of a run, nor more noise, nor a larger delta begins anew."""
    local = {"max_epsilon": UploadPrivacy(0.5, 0.2).epsilon(3) + 0.1}
    run(tmp_path, local)
    with pytest.raises(UserError, match="Round 1 needs 3 replies and has 0"):
        run(tmp_path, local, out="second")
    with pytest.raises(UserError, match="Round 1 needs 3 replies and has 0"):
        run(tmp_path, local, out="third", dp_noise=2.0, dp_delta=0.4)
    run(tmp_path, {"max_epsilon": 1000}, out="fourth", dp_noise=2.0, rounds=1)
    found = SiteAccount(tmp_path / "site-0")
    assert sorted(upload.noise for upload in found.uploads()) == [0.2, 0.2, 0.2, 2.0]
    assert found.epsilon == total_epsilon([0.2, 0.2, 0.2, 2.0])


def test_a_site_that_gives_away_nothing_more_is_still_asked_for_what_tells_nothing(tmp_path):
    """Its evaluations go on, so it keeps models, and other clients train."""
    limit = UploadPrivacy(0.5, 0.2).epsilon(1)
    config = from_keywords("fedrep", "digits", {"clients": 3, "rounds": 3, "device": "cpu", **PRIVACY})
    mine = {"dataset": "digits", "device": "cpu"}
    some = {1: {"max_epsilon": limit + 0.1}}
    link = InProcess({i: Host(i, tmp_path / f"site-{i}", {**mine, **some.get(i, {})}) for i in range(3)})
    result = Server(link, Terms(repeats=0, minimum=2)).run(config, out=tmp_path / "run")
    assert [row["cohort"] for row in result.rounds] == [3, 2, 2]
    assert len(SiteAccount(tmp_path / "site-1").uploads()) == 1
    folder = next(path for path in (tmp_path / "site-1").iterdir() if path.is_dir())
    assert json.loads((folder / "models.json").read_text())["rounds"]["last"] == 3


def test_what_a_failure_has_cut_off_does_not_count(tmp_path):
    account, privacy = SiteAccount(tmp_path), UploadPrivacy(1.0, 1.0)
    account.release("a", 0, {"w": torch.zeros(3)}, privacy)
    with (tmp_path / ACCOUNT).open("a") as file:
        file.write("a 1 abc")
    account.release("a", 1, {"w": torch.ones(3)}, privacy)
    assert {(upload.run, upload.t) for upload in account.uploads()} == {("a", 0), ("a", 1)}
    assert account.epsilon == privacy.epsilon(2)


def test_a_secret_that_is_too_short_is_not_used(tmp_path):
    """As after a full disk: whoever guesses it would know the noise."""
    (tmp_path / SECRET).write_bytes(b"")
    with pytest.raises(UserError, match=r"noise\.key is damaged; remove it"):
        SiteAccount(tmp_path).noise(b"")
    (tmp_path / SECRET).unlink()
    made = SiteAccount(tmp_path).noise(b"x")(torch.tensor([0]), 0, torch.zeros(1, 3, dtype=torch.float64))
    again = secret_noise((tmp_path / SECRET).read_bytes(), b"x")
    assert torch.equal(made, again(torch.tensor([0]), 0, torch.zeros(1, 3, dtype=torch.float64)))


# -- own data


def own_site(tmp_path, i, **local):
    draw = np.random.default_rng(i)
    rows = [f"{draw.normal():.3f},{draw.normal():.3f},{'ab'[draw.integers(2)]}" for _ in range(40 + i)]
    path = tmp_path / f"{i}.csv"
    path.write_text("\n".join(["x,z,label", *rows]))
    return Host(i, tmp_path / f"site-{i}", {"dataset": {"name": "own", "path": str(path)}, "device": "cpu", **local})


def test_with_a_schema_nothing_is_told_before_training(tmp_path):
    own_site(tmp_path, 7)
    schema = make_schema(own_site(tmp_path, 7).own)
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema.to_json()))
    sites = {i: own_site(tmp_path, i, max_epsilon=1e6, schema=str(path)) for i in range(2)}
    asked = {"algorithm": "fedavg", "rounds": 2, **PRIVACY}
    link = InProcess(sites)
    server = Server(link, Terms(repeats=0))
    server.run_on_own_data(asked, 2, out=tmp_path / "run", schema=schema)
    answers = [decode(answer) for _, _, answer in link.log]
    assert {answer.kind for answer in answers} == {"counted", "ready", "reply", "done"}
    (counted, other) = (dict(answer.fields) for answer in answers if answer.kind == "counted")
    assert counted["moments"] == {}
    assert {**counted, "client": 1} == other  # 40 and 41 samples


def test_a_site_with_a_limit_and_no_schema_tells_nothing(tmp_path):
    link = InProcess({i: own_site(tmp_path, i, max_epsilon=5.0) for i in range(2)})
    with pytest.raises(UserError, match="it tells nothing of its samples before; give a schema"):
        Server(link, Terms(repeats=0)).run_on_own_data({"algorithm": "fedavg", "rounds": 1, **PRIVACY}, 2)
    assert {decode(answer).kind for _, _, answer in link.log} == {"failure"}
