"""Audits: every method can be attacked or says why not, attacks change nothing, and what is found adds up."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_federation, make_unfinished, methods, token_task
from owndata import csv as table
from owndata import rows as patients
from owndata import write
from PIL import Image
from sentences import user_error

import fedloom
from fedloom.attacks import inversion
from fedloom.core.algorithm import ALGORITHMS
from fedloom.studies import audit_findings
from fedloom.studies.audit import audit
from fedloom.studies.audit_findings import mean_sample, sample_range
from fedloom.studies.audited_uploads import AuditOptions

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
TINY = {"rounds": 2, "clients": 20, "subset": 3, "partition": "iid", "device": "cpu", "plan": "per-client"}
QUICK = {"iterations": 1, "victims": 1, "batches": 1}
SETTINGS = {"pfedkt": "pfedkt:hn_steps=3"}  # it computes less, and does the same


@pytest.fixture(scope="module")
def everything():
    """All methods, with all attacks."""
    tiny = TINY | {"rounds": 1, "batch_size": 20, "width": 8}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inversion, "STARTS", 1)
        return audit([SETTINGS.get(name, name) for name in methods()], **QUICK, **tiny)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A finished run, and a comparison with one."""
    folder = tmp_path_factory.mktemp("runs")
    fedloom.run("fedrep", out=folder / "run", **TINY)
    fedloom.compare("fedavg", seeds=1, out=folder / "compared", **TINY | {"rounds": 1, "subset": 2})
    return folder


def of(found, attack):
    return [row for row in found.attacks if row["attack"] == attack]


# -- every method


@pytest.mark.parametrize("name", methods())
def test_every_method_is_attacked_or_says_why_not(everything, name):
    rows = [row for row in everything.summary if row["method"].partition(":")[0] == name]
    assert rows
    for row in rows:
        assert math.isfinite(row["membership_auc"])
        assert row["membership_clients"] == 3
        if row["why_not"]:
            assert len(rows) == 1
            assert (row["step_batches"], row["round_batches"], row["part"]) == (0, 0, "")
        else:
            assert math.isfinite(row["step_psnr"])
            assert math.isfinite(row["round_psnr_ref"])
            assert (row["step_batches"], row["round_batches"]) == (1, 1)


def test_the_page_lists_the_methods_that_cannot_be_attacked(everything):
    page = re.findall(r"^\| \[([\w-]+)\]\(methods/\1\.md\) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(page) == {row["method"]: row["why_not"] for row in everything.summary if row["why_not"]}


def test_registered_methods_of_others_are_attacked_too(monkeypatch):
    monkeypatch.setattr(ALGORITHMS, "_known", {name: ALGORITHMS[name] for name in ALGORITHMS.names()})

    class Mine(ALGORITHMS["fedavg"]):
        """A method that has another name for what it uploads."""

        name = "mine"
        uploads = {"theta": "the trained model"}

        def init_server(self, task, key):
            return {"theta": task.init(key)}

        def begin(self, task, down, state, info):
            return {"w": task.slot(down["theta"])}

        def finish(self, task, work, down, state, info):
            return state, {"theta": work["w"].params}

        def aggregate(self, task, server, up, info, t, key):
            return {"theta": task.average(up["theta"], info.n)}

        def global_model(self, task, server):
            return server["theta"]

    mine, plain = (audit(one, attacks=["round"], **QUICK, **TINY) for one in (Mine, "fedavg"))
    assert [row["psnr"] for row in mine.attacks] == pytest.approx([row["psnr"] for row in plain.attacks], abs=1e-6)


# -- what is attacked


def test_one_sample_of_a_linear_model_is_recovered():
    """Through everything that the server sees: above 40 dB, in the first and in the last round."""
    found = audit("fedavg", attacks=["step"], iterations=40, victims=2, model="logreg", **TINY)
    rows = of(found, "step")
    assert [(row["round"], row["samples"]) for row in rows] == [(1, 1), (1, 1), (2, 1), (2, 1)]
    assert all(row["psnr"] > 40 for row in rows)
    assert found.summary[0]["step_recovered"] == 1
    assert found.summary[0]["step_psnr"] > found.summary[0]["step_guess"] + 25


def test_a_method_that_takes_batches_in_pairs_makes_a_step():
    """Per-FedAvg needs two batches, so two samples are the fewest."""
    found = audit("per-fedavg", attacks=["step"], **QUICK, **TINY)
    assert [row["samples"] for row in found.attacks] == [2, 2]
    assert all(row["distance"] < 0.99 for row in found.attacks)  # 1 is that of an upload that shows nothing


@pytest.mark.parametrize(
    ("gap", "total", "rounds"), [(None, 5, [0, 4]), (None, 1, [0]), (2, 5, [0, 2, 4]), (100, 201, [0, 100, 200])]
)
def test_the_rounds_that_are_attacked(gap, total, rounds):
    assert AuditOptions(gap=gap).rounds(total) == rounds
    assert AuditOptions(gap=gap, attacks=("membership",)).rounds(total) == []


def test_victims_and_batches_are_as_many_as_asked_for():
    found = audit("fedavg", attacks=["round"], iterations=1, victims=None, batches=2, gap=1, **TINY)
    at = [(row["round"], row["client"], row["batch"]) for row in found.attacks]
    assert sorted(at) == [(t, i, j) for t in (1, 2) for i in range(3) for j in range(2)]
    few = audit("fedavg", attacks=["round"], **QUICK, **TINY)
    assert len(few.attacks) == 2
    assert {(row["round"], row["client"]) for row in few.attacks} <= {(t, i) for t, i, _ in at}


def test_an_audit_changes_nothing_in_training():
    """The same accuracies, up to rounding, as those of a run that nobody watches."""
    found = audit("scaffold", attacks=["round", "step"], **QUICK, **TINY)
    run = fedloom.run("scaffold", **TINY)
    assert found.summary[0]["score"] == pytest.approx(run.best_on_validation("pre")["pre_acc_mean"], abs=1e-9)


def test_a_finished_run_is_attacked_as_its_method(saved):
    """It is trained once more for its uploads."""
    run, method = audit(saved / "run", **QUICK), audit("fedrep", **QUICK, **TINY)
    for mine, other in zip(run.attacks + run.clients, method.attacks + method.clients, strict=True):
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, abs=1e-3, nan_ok=True), name
    assert run.summary[0]["score"] == pytest.approx(method.summary[0]["score"])
    loaded = audit(fedloom.load(saved / "run"), attacks="membership")
    assert loaded.summary[0]["membership_auc"] == pytest.approx(run.summary[0]["membership_auc"])


# -- what is found


@pytest.fixture(scope="module")
def noisy():
    """Accuracy and leakage over epsilon, of a method that can have noise and of one that cannot."""
    options = {"attacks": ["step", "membership"], "iterations": 20, "victims": 1}
    noise = {"dp_clip": 1.0, "dp_noise": [0.001, 10.0]}
    return audit(["fedavg", "fedfomo"], model="logreg", **options, **noise, **TINY)


def test_amounts_of_noise_are_compared_with_each_other_and_with_none(noisy):
    rows = [(row["method"], row["dp_noise"]) for row in noisy.summary]
    assert rows == [("fedavg", None), ("fedavg", 0.001), ("fedavg", 10.0), ("fedfomo", None)]
    none, little, much = noisy.summary[:3]
    assert none["epsilon"] is None
    assert little["epsilon"] > 1000 > 10 > much["epsilon"] > 0
    assert none["step_psnr"] > little["step_psnr"] > much["step_psnr"]
    assert none["step_recovered"] == 1
    assert much["step_recovered"] == 0
    assert none["score"] > much["score"]


def test_one_amount_of_noise_stands_alone():
    found = audit("fedavg", attacks=["membership"], dp_clip=1.0, dp_noise=0.5, **TINY)
    assert [row["dp_noise"] for row in found.summary] == [0.5]


def test_numbers_are_means_over_batches_clients_and_rounds(everything):
    found = audit("gpfl", iterations=1, victims=2, batches=2, every_part=True, **TINY)
    assert [row["part"] for row in found.summary] == ["body", "body, valve", "body, valve, embeddings"]
    for row in found.summary:
        mine = [one for one in of(found, "round") if one["part"] == row["part"]]
        assert row["round_batches"] == len(mine) == 2 * 2 * 2
        for name in ("psnr_ref", "psnr", "ssim", "guess"):
            assert row[f"round_{name}"] == pytest.approx(np.mean([one[name] for one in mine]))
    aucs, weights = zip(
        *((c["auc"], c["members"] * c["others"] / (c["members"] + c["others"])) for c in found.clients), strict=True
    )
    assert found.summary[0]["membership_auc"] == pytest.approx(np.average(aucs, weights=weights))


def test_attacks_that_end_in_nan_are_left_out_and_counted(monkeypatch):
    real = audit_findings.deep_leakage

    def broken(given, steps):
        found = real(given, steps)
        found.x[0] = torch.nan
        return found

    monkeypatch.setattr(audit_findings, "deep_leakage", broken)
    found = audit("fedavg", attacks=["round"], iterations=1, victims=2, batches=1, **TINY)
    (row,) = found.summary
    kept = [one["psnr"] for one in found.attacks if not math.isnan(one["psnr"])]
    assert (row["round_batches"], row["round_failed"], len(kept)) == (4, 1, 3)
    assert row["round_psnr"] == pytest.approx(np.mean(kept))


def test_samples_are_pixels_of_known_range_or_numbers_of_the_range_seen():
    data = make_federation([6, 8])
    low, high = sample_range(data)
    rows = data.splits["train"].flat
    assert (low, high) == (data.x[rows].min(), data.x[rows].max())
    assert torch.allclose(mean_sample(data), data.x[rows].mean(0))
    pixels = replace(data, x=torch.full((len(data.x), 3, 2, 2), 7, dtype=torch.uint8), mean=(0.5,) * 3, std=(0.5,) * 3)
    assert sample_range(pixels) == pytest.approx((-1, 1))  # whatever pixels there are
    assert mean_sample(pixels).flatten().tolist() == pytest.approx([7 / 255 * 2 - 1] * 12)


def test_the_range_of_values_does_not_enter_the_scores_of_the_paper():
    """ "psnr_ref" compares with sigmoids, "psnr" with what they stand for; both of the same recovered batch."""
    found = audit("fedavg", attacks=["round"], **QUICK, **TINY)
    assert found.attacks[0]["psnr_ref"] != pytest.approx(found.attacks[0]["psnr"], abs=0.1)


# -- files


def test_files(everything, tmp_path):
    paths = everything.save(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [
        "audit.json",
        "summary.csv",
        "attacks.csv",
        "clients.csv",
        "recoveries.png",
    ]
    stored = json.loads(paths[0].read_text())
    assert [len(stored[name]) for name in ("summary", "attacks", "clients")] == [
        len(everything.summary), len(everything.attacks), len(everything.clients),
    ]  # fmt: skip
    assert "NaN" not in paths[0].read_text()
    rows = list(csv.DictReader(paths[1].read_text().splitlines()))
    assert [row["method"] for row in rows] == [row["method"] for row in everything.summary]
    assert float(rows[0]["membership_auc"]) == everything.summary[0]["membership_auc"]


def test_the_curve_is_drawn_where_there_are_several_epsilons(noisy, tmp_path):
    paths = {path.name: path for path in noisy.save(tmp_path)}
    assert {"recoveries.png", "epsilon.png"} <= set(paths)
    for name in ("recoveries.png", "epsilon.png"):
        with Image.open(paths[name]) as picture:
            assert min(picture.size) > 300


def test_pictures_are_samples_and_what_was_found(everything):
    for one in everything.pictures:
        assert one.x.shape == one.found.shape == (len(one.psnr), 8, 8, 1)
        for pixels in (one.x, one.found):
            assert 0 <= pixels.min() <= pixels.max() <= 1
    assert {one.attack for one in everything.pictures} == {"round", "step"}


def test_tables_of_pandas(everything):
    pytest.importorskip("pandas")
    assert len(everything.to_pandas()) == len(everything.summary)
    assert set(everything.to_pandas("clients")["client"]) == {0, 1, 2}
    with user_error("Unknown table 'client'", "did you mean 'clients'?"):
        everything.to_pandas("client")


# -- other data


def test_samples_of_words_have_membership_only():
    data = replace(token_task().data, dtype=torch.float32)
    with user_error("words or characters", "add membership to the attacks"):
        audit("fedavg", data, attacks=["round", "step"], model="lstm_so", **QUICK)


def test_samples_that_are_no_pictures_have_no_ssim_and_no_picture(tmp_path):
    data = make_federation([30, 30], dtype=torch.float32)
    found = audit("fedavg", data, model="mlp", rounds=1, device="cpu", plan="per-client", **QUICK)
    assert math.isnan(found.summary[0]["round_ssim"])
    assert math.isfinite(found.summary[0]["round_psnr"])
    assert math.isnan(found.summary[0]["membership_auc"])  # with fewer than ten samples for testing, nothing is said
    assert "recoveries.png" not in [path.name for path in found.save(tmp_path)]


# -- mistakes


MISTAKES = {
    "unknown attack": ({"attacks": ["rounds"]}, "Unknown attack 'rounds'; did you mean 'round'?"),
    "no attack": ({"attacks": []}, "An audit needs an attack"),
    "no victims": ({"victims": 0}, "victims must be a whole number of at least 1, not 0"),
    "half a batch": ({"batches": 0.5}, "batches must be a whole number of at least 1, not 0.5"),
    "no samples": ({"samples": None}, "samples must be a whole number"),
    "a gap of 0": ({"gap": 0}, "gap must be a whole number"),
    "iterations": ({"iterations": True}, "iterations must be a whole number"),
    "noise without a norm": ({"dp_noise": 0.5}, "dp_noise=0.5 belongs to dp_clip"),
    "negative noise": ({"dp_noise": [1, -1], "dp_clip": 1.0}, "numbers above 0, such as 0.5 or 1, not -1."),
    "noise that is a word": ({"dp_noise": ["a"]}, "dp_noise must be numbers above 0"),
    "endless noise": ({"dp_noise": math.inf, "dp_clip": 1.0}, "dp_noise must be numbers above 0"),
    "unknown setting": ({"lamda": 1}, "Unknown setting 'lamda'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_found_before_anything_is_trained(case, monkeypatch):
    given, said = MISTAKES[case]
    monkeypatch.setattr("fedloom.studies.audit.execute", lambda *args, **named: pytest.fail("it trains"))
    with user_error(said):
        audit("fedavg", **{**TINY, **given})


def test_noise_that_means_nothing_is_refused_for_methods_that_cannot_have_any():
    with user_error("dp_noise must be numbers above 0"):
        audit("hypcluster", dp_noise=-1, dp_clip=1.0, **TINY)


def test_what_is_no_finished_run(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, *said in (
        (saved, "is not the folder of a run"),
        (saved / "compared", "of a comparison or a sweep, name one of its runs"),
        (tmp_path / "nothing", "There is no folder", "name a finished run"),
    ):
        with user_error(*said):
            audit(folder, attacks="membership")
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "federation.json").write_text("{}")
    with user_error("at sites of their own, so no attack could be judged"):
        audit("sites")
    fedloom.run("fedavg", out="started", **TINY)
    make_unfinished(Path("started"))
    with user_error("started is not finished; continue the run with --resume started."):
        audit("started")
    with user_error("Unknown algorithm 'fedavgg'; did you mean 'fedavg'?"):
        audit("fedavgg")
    with user_error("An audit needs a method or a run"):
        audit([])


def test_a_folder_with_the_name_of_a_method_is_in_nobody_s_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("fedavg").mkdir()
    assert audit("fedavg", attacks="membership", **TINY | {"rounds": 1}).summary[0]["method"] == "fedavg"


def test_a_run_keeps_its_settings(saved):
    with user_error("A finished run has its settings; leave out rounds"):
        audit(saved / "run", rounds=5)
    with user_error("leave out dp_noise"):
        audit(saved / "run", dp_noise=1.0)


def test_a_run_without_models(tmp_path):
    fedloom.run("fedavg", out=tmp_path / "run", keep="none", **TINY | {"rounds": 1})
    with user_error("run with keep=none"):
        audit(tmp_path / "run")
    assert audit(tmp_path / "run", attacks="round", **QUICK).summary[0]["round_batches"] == 1


def test_a_run_that_has_kept_its_last_models_only():
    run = fedloom.run("fedavg", keep="last", **TINY)
    assert math.isfinite(audit(run, attacks="membership").summary[0]["membership_auc"])


def test_data_that_have_changed(tmp_path):
    path = write(tmp_path / "patients.csv", table(patients(90)))
    run = fedloom.run("fedavg", str(path), out=tmp_path / "run", rounds=1, device="cpu", plan="per-client")
    write(path, table(patients(93)))
    with user_error("not those that the run was trained with"):
        audit(run)


def test_a_run_on_data_that_were_made_in_python():
    run = fedloom.run("fedavg", make_federation([9, 9], dtype=torch.float32), model="mlp", rounds=1, device="cpu")
    with user_error("The dataset of this run was made in Python; audit the method instead"):
        audit(run)
