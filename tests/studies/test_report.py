"""What the report page shows: its numbers are those of the leaderboard and the records, and its sentences are true."""

import base64
import html
import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from helpers import Crash, crash_after, make_federation, make_unfinished, run_cli, with_targets
from sentences import user_error

import fedloom
from fedloom.report.leaderboard import VIEWS
from fedloom.report.page.assemble import page
from fedloom.storage.files import read_json, read_table
from fedloom.storage.manifest import Manifest
from fedloom.studies import report_data
from fedloom.studies.found_runs import about_progress, find_runs
from fedloom.studies.report import write_report
from fedloom.studies.report_data import collect, findings

NAMES = ("</script><b>x</b>", "<!--", "a'b\"c\\", "@@DATA@@", "e")
CLASSES = ("<b>ill</b>", "well", "</SCRIPT >", "\u2028")
SMALL = {"width": 8, "device": "cpu", "plan": "per-client", "batch_size": 20}


def federation():
    data = make_federation((12, 30, 7, 20, 25), server=20, dtype=torch.float32)
    return replace(data, client_names=NAMES, class_names=CLASSES)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "comparison"
    return fedloom.compare(["plgu-lf", "page:ep_max=2"], federation(), rounds=3, seeds=2, out=folder, **SMALL)


@pytest.fixture(scope="module")
def shown(comparison):
    return collect(find_runs(comparison.folder))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A run that predicts numbers, with held-out clients and differential privacy."""
    data = with_targets(make_federation((20, 30, 25, 20, 22), held_out=9, dtype=torch.float32), "number")
    private = {"dp_clip": 1.0, "dp_noise": 1.0}
    folder = tmp_path_factory.mktemp("numbers") / "run"
    return fedloom.run("fedrep", data, rounds=3, holdout_clients=2, out=folder, **private, **SMALL)


def of(data, label):
    return next(method for method in data["methods"] if method["label"] == label)


def runs_of(comparison, label):
    return [comparison.run(label, seed) for seed in comparison.config["seeds"]]


def decoded(packed, clients):
    values = np.frombuffer(base64.b64decode(packed["data"]), "<u2").astype(float)
    scores = packed["low"] + values / 65534 * (packed["high"] - packed["low"])
    return np.where(values == 65535, np.nan, scores).reshape(-1, clients)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_tables_are_those_of_the_leaderboard(comparison, shown):
    """The comparison writes them as Markdown: title in bold, header, rule, rows."""
    text = (comparison.folder / "leaderboard.md").read_text()
    printed = {}
    for block in text.split("**")[1::2]:
        lines = text.partition(f"**{block}**")[2].partition("**")[0].splitlines()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
        printed[block.removesuffix(".")] = [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    assert set(printed) == {table["title"] for table in shown["tables"]}
    for table in shown["tables"]:
        rows = printed[table["title"]]
        assert [row["method"] for row in table["rows"]] == [row["method"] for row in rows]
        for mine, expected in zip(table["rows"], rows, strict=True):
            texts = {column["title"]: cell[1] for column, cell in zip(table["columns"], mine["cells"], strict=True)}
            assert {k: v for k, v in expected.items() if k not in ("method", "#") and v} == {
                title: text for title, text in texts.items() if text and title in expected
            }
            if table["ranked"]:
                assert str(mine["rank"]) == expected["#"]


def test_every_table_has_what_a_client_computed(comparison, shown):
    for table in shown["tables"]:
        at = {column["key"]: k for k, column in enumerate(table["columns"])}
        for row in table["rows"]:
            if row["method"] in comparison.config["methods"]:
                spent = np.mean([run.computed()["samples"] for run in runs_of(comparison, row["method"])])
                assert row["cells"][at["samples_in_all"]][0] == pytest.approx(spent, rel=1e-5)


@pytest.mark.parametrize("view", VIEWS)
def test_curves_and_scores_are_means_over_seeds(comparison, shown, view):
    for label in comparison.config["methods"]:
        method, runs = of(shown, label), runs_of(comparison, label)
        if view not in runs[0].views():
            assert view not in method["curves"]
            continue
        for key in ("mean", "low5", "top5", "worst"):
            expected = np.mean([[row[f"{view}_acc_{key}"] for row in run.rounds] for run in runs], axis=0)
            assert method["curves"][view][key] == pytest.approx(expected, rel=1e-5)
        assert method["rounds"] == [1, 2, 3]
        table = np.mean([run.clients[f"{view}_acc"].to_numpy().reshape(3, 5) for run in runs], axis=0)
        found, packed = decoded(method["scores"][view], 5), method["scores"][view]
        half_a_step = (packed["high"] - packed["low"]) / 65534 / 2
        np.testing.assert_allclose(found, table, rtol=0, atol=1.01 * half_a_step + 1e-4)


def test_final_scores_are_of_each_seed_s_best_round(comparison, shown):
    for label in comparison.config["methods"]:
        found, each = of(shown, label)["final"]["pre"], []
        for run in runs_of(comparison, label):
            table = run.clients.filter(pc.field("round") == run.best_on_validation("pre")["round"])
            each.append(table["pre_acc"].to_numpy())
        for key, pick in (("mean", np.mean), ("low", np.min), ("high", np.max)):
            assert found[key] == pytest.approx(pick(each, axis=0), abs=1e-3)
        assert found["score"] == pytest.approx(np.mean(each), rel=1e-5)


def test_axes_add_up_to_what_was_spent(comparison, shown):
    for label in comparison.config["methods"]:
        axes, runs = of(shown, label)["axes"], runs_of(comparison, label)
        assert axes["rounds"] == [1, 2, 3]
        sent = np.mean([sum(row["bytes_down"] + row["bytes_up"] for row in run.rounds) for run in runs])
        assert axes["bytes"][-1] == pytest.approx(sent, rel=1e-5)
        assert axes["gradients"][-1] == pytest.approx(np.mean([run.computed()["gradients"] for run in runs]), rel=1e-5)
        assert axes["seconds"][-1] == pytest.approx(np.mean([run.seconds for run in runs]), rel=1e-5)
        assert all(axes[name] == sorted(axes[name]) for name in axes)


def test_bytes_of_rounds_that_were_not_evaluated_count_as_well():
    """Evaluated after rounds 2 and 3, with 10 and 4 bytes: 10 + 10 + 4."""
    rounds = [{"round": t, "bytes_down": b, "bytes_up": 0} for t, b in ((2, 10.0), (3, 4.0))]
    timings = [{"round": t, "train_seconds": 1.0, "gradients": 8.0, "participation": 0.5} for t in (1, 2, 3)]
    found = report_data._axes([SimpleNamespace(rounds=rounds, timings=timings)], [2, 3])
    assert found == {"rounds": [2, 3], "bytes": [20.0, 24.0], "seconds": [2.0, 3.0], "gradients": [8.0, 12.0]}


def test_the_partition_is_that_of_the_run(shown):
    data = federation()
    found = shown["partition"]
    assert found["names"] == list(NAMES)
    assert found["classes"] == list(CLASSES)
    for i in range(5):
        rows = torch.cat([data.splits[split][i] for split in ("train", "val", "test")])
        assert found["labels"][i] == torch.bincount(data.y[rows], minlength=4).tolist()
        assert found["samples"][i] == len(rows)
        assert {split: of_all[i] for split, of_all in found["sizes"].items()} == {
            split: len(data.splits[split][i]) for split in ("train", "val", "test")
        }


def test_confusion_and_calibration_count_every_prediction(comparison, shown):
    tests = sum(shown["partition"]["sizes"]["test"])
    for label in comparison.config["methods"]:
        method = of(shown, label)
        matrix = np.array(method["confusion"])
        assert matrix.shape == (4, 4)
        assert matrix.sum() == 2 * tests  # two seeds
        samples, _, right = (np.array(column, dtype=float) for column in zip(*method["reliability"], strict=True))
        assert samples.sum() == 2 * tests
        assert np.nansum(samples * right) == pytest.approx(np.trace(matrix), abs=1e-3)


def test_what_page_and_plgu_report(comparison, shown):
    reports = {report["name"]: report for report in of(shown, "page:ep_max=2")["reports"]}
    tables = [run.reports for run in runs_of(comparison, "page:ep_max=2")]
    for name, column, server in (
        ("learning rate eta", "eta", False),
        ("local epochs alpha", "alpha", False),
        ("reward of a client's agent", "reward", False),
        ("weight p of a client in the average", "p", False),
        ("reward of the server's agent", "reward_CS", True),
    ):
        assert reports[name]["who"] == ("server" if server else "clients")
        for k, t in enumerate((1, 2, 3)):
            rows = [row for table in tables for row in table.to_pylist() if row["round"] == t]
            values = [row[column] for row in rows if (row["client"] < 0) == server]
            assert len(values) == (2 if server else 10)
            for key, pick in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                assert reports[name][key][k] == pytest.approx(pick(values), rel=1e-5, abs=1e-6)
    (xi,) = of(shown, "plgu-lf")["reports"]
    assert (xi["name"], xi["who"], xi["rounds"]) == ("layer scores xi", "vector", [1, 2, 3])
    last = [row["xi"] for run in runs_of(comparison, "plgu-lf") for row in run.reports.to_pylist() if row["round"] == 3]
    assert xi["values"][-1] == pytest.approx(np.mean(last, axis=0), rel=1e-5)


def test_uploads_that_were_not_used_are_counted_by_client():
    reports = pa.table(
        {"client": [3, 5, 9, 3, -1], "diverged": [0.0, 0.0, 1.0, 0.0, None], "left_out": [1.0, 0.0, 0.0, 1.0, None]}
    )
    results = [SimpleNamespace(reports=reports), SimpleNamespace(reports=reports.select(["client", "left_out"]))]
    # clients 3 and 5 are shown, as places 0 and 1; both runs have two uploads of client 3 that were left out
    assert report_data._screened(results, np.array([3, 5])) == {"left_out": {"0": 4}}
    assert report_data._screened(results, np.array([5, 9])) == {"diverged": {"1": 1}}


def test_how_runs_were_made(comparison, shown):
    assert {run["folder"] for run in shown["runs"]} >= {"runs/plgu-lf/seed-0", "runs/plgu-lf/seed-1"}
    for run in shown["runs"]:
        assert run["packages"]["torch"] == torch.__version__
        assert run["plan"]["mode"] == "per-client"
        assert "rounds: 3" in run["config"]
        assert (run["finished"], run["round"]) == (True, 3)
    assert shown["progress"] == ""


def test_a_run_of_numbers_with_held_out_clients_and_privacy(numbers):
    data = collect(find_runs(numbers.folder))
    assert (data["task"]["metric"], data["task"]["higher"], data["task"]["percent"]) == ("rmse", False, False)
    assert data["task"]["tails"] == ["worst 5 %", "best 5 %"]
    (method,) = data["methods"]
    table = numbers.clients.filter(pc.field("round") == numbers.best_on_validation("pre")["round"])
    for view, held_out in (("pre", False), ("new", True), ("joined", True)):
        values = table[f"{view}_rmse"].to_numpy()
        assert [v is None for v in method["final"][view]["mean"]] == [held_out] * 3 + [not held_out] * 2
        known = [v for v in method["final"][view]["mean"] if v is not None]
        assert known == pytest.approx(values[~np.isnan(values)], abs=1e-4)
        assert data["views"][view]
    assert data["partition"]["held_out"] == [False] * 3 + [True] * 2
    assert data["partition"]["labels"] is None  # a number has no classes
    assert (method["confusion"], method["reliability"]) == (None, None)
    assert method["epsilon"] == pytest.approx(numbers.epsilon, rel=1e-5)
    worst = numbers.best_on_validation("pre")["pre_rmse_low5"]
    score = numbers.best_on_validation("pre")["pre_rmse_mean"]
    last = max(v for v in method["final"]["pre"]["mean"] if v is not None)
    assert data["findings"] == [
        f"Mean rmse of clients: {score:.4g}.",
        f"With fedrep, client {method['final']['pre']['mean'].index(last)} is worst off ({last:.4g}).",
        f"Mean rmse of the worst 5 % of clients: {worst:.4g}.",
        f"Uploads have differential privacy, with epsilon {numbers.epsilon:.3g} at most.",
    ]


def test_equal_budgets_are_told(tmp_path):
    settings = {"rounds": 4, "equal_budget": "fedavg", "out": tmp_path / "runs", **SMALL}
    fedloom.compare(["fedavg", "ditto"], make_federation((20, 20), dtype=torch.float32), **settings)
    data = collect(find_runs(tmp_path / "runs"))
    assert any(text.startswith("Equal budgets: every method has") for text in data["findings"])
    assert of(data, "ditto")["axes"]["rounds"][-1] == 2  # it takes two steps where FedAvg takes one
    assert of(data, "fedavg")["axes"]["rounds"][-1] == 4


# -- sentences --------------------------------------------------------------------------------------------------------


def board_row(method, mean, low, **more):
    return {"method": method, "model": "pre", "selection": "last", "acc_mean": mean, "acc_low5": low, **more} | {
        "acc_mean_std": None
    }


def told(board, *methods, **task):
    about = {"metric": "accuracy", "column": "acc", "percent": True, "higher": True, "tails": ["lowest 5 %", "top"]}
    partition = {"ids": [4, 5, 6], "names": ["ann", "bob", "cy"]}
    return findings({"task": about | task, "methods": methods, "partition": partition}, board)


def method(label, epsilon=None, uploads=("w",), scores=(), validation=(None, None)):
    found = {"label": label, "name": label.partition(":")[0], "uploads": dict.fromkeys(uploads, "the model")}
    found |= {
        "final": {"pre": {"mean": list(scores)}},
        "validation": dict(zip(("score", "loss"), validation, strict=True)),
    }
    return found | {"epsilon": epsilon, "screened": {}}


def test_findings_name_the_best_on_average_and_for_the_worst_served():
    board = [
        board_row("ditto", 81.25, 40.0, rank=1, harmed=10.0),
        board_row("fedrep", 81.0, 52.5, rank=1, harmed=20.0),
        board_row("majority", 80.0, 99.0, rank=1, harmed=0.0),  # is no method
        board_row("fedavg", 70.0, 50.0, rank=4, harmed=60.0),
        board_row("local", 69.0, 51.0, rank=4, harmed=0.0),
    ]
    assert told(board) == [
        "ditto serves clients best on average (81.2 %); fedrep is a tie with it, by the paired test.",
        "Best for the lowest 5 % of clients: fedrep (52.5 %).",
        "Clients that do worse than by training alone: fewest with ditto (10 %), most with fedavg (60 %).",
    ]
    alone = [board_row("a", 81.0, 40.0, rank=1), board_row("b", 71.0, 45.0, rank=2), board_row("c", 70.0, 9.0, rank=3)]
    assert told(alone)[0] == "a serves clients best on average (81.0 %), by more than chance."
    three = [row | {"rank": 1} for row in alone]
    assert told(three)[0].endswith("; b and c are a tie with it, by the paired test.")
    unranked = [{k: v for k, v in row.items() if k != "rank"} for row in alone]
    assert told(unranked)[0] == "a serves clients best on average (81.0 %)."


def test_findings_name_the_client_that_the_best_method_serves_worst():
    board = [board_row("a", 81.0, 40.0, rank=1), board_row("b", 71.0, 45.0, rank=2)]
    b = method("b", scores=(0.0, 1.0, 2.0))
    assert "With a, bob is worst off (40.0 %)." in told(board, b, method("a", scores=(60.0, 40.0, None)))
    assert "With a, ann and 1 other client are worst off (40.0 %)." in told(
        board, method("a", scores=(40.0, 60.0, 40.0))
    )
    assert "With a, ann is worst off (60)." in told(
        board, method("a", scores=(60.0, 40.0, 50.0)), higher=False, percent=False
    )
    assert not any("worst off" in text for text in told(board, b))  # of the best one nothing is known


def test_settings_of_a_method_are_chosen_by_validation():
    board = [board_row("ditto:lam=1", 81.0, 40.0, rank=1), board_row("ditto:lam=2", 71.0, 45.0, rank=2)]
    one, two = (method(f"ditto:lam={k}", validation=v) for k, v in ((1, (80.0, 0.5)), (2, (80.0, 0.4))))
    text = "On validation data ditto:lam=2 is best (80.0 %); choose settings by that, as all other scores here are on "
    assert told(board, one, two)[1] == f"{text}test data."
    for methods in ((one, two, method("fedavg", validation=(90.0, 0.1))), (one, method("ditto:lam=2"))):
        assert not any("validation" in text for text in told(board, *methods))


def test_lower_is_better_for_an_error():
    rows = [
        {"method": name, "model": "pre", "selection": "last", "metric": "rmse", "rmse_mean": mean, "rmse_low5": low}
        | {"rmse_mean_std": None}
        for name, mean, low in (("a", 1.0, 3.0), ("b", 2.0, 2.5))
    ]
    task = {"metric": "rmse", "column": "rmse", "percent": False, "higher": False, "tails": ["worst 5 %", "best 5 %"]}
    assert told(rows, **task) == [
        "a serves clients best on average (1).",
        "Best for the worst 5 % of clients: b (2.5).",
    ]


def test_uploads_that_were_not_used_are_told():
    lost = method("a") | {"screened": {"diverged": {"0": 3}, "left_out": {"0": 1, "2": 1}}}
    text = "Uploads that the server did not use: 5 of a (below, under Uploads not used)."
    assert text in told([board_row("a", 80.0, 40.0)], lost, method("b"))
    assert not any("not use" in text for text in told([board_row("b", 80.0, 40.0)], method("b")))


def test_what_is_told_of_privacy():
    rows = [board_row("a", 80.0, 40.0)]
    private, infinite, bare, silent = method("a", 2.0), method("b", math.inf), method("c"), method("local", None, ())
    assert told(rows, private, method("d", 3.456), silent)[-1] == (
        "Uploads have differential privacy, with epsilon 3.46 at most."
    )
    without = "no differential privacy: the server sees what each client sends (below, under Cost)."
    assert told(rows, private, infinite, bare)[-1] == f"Uploads of b and c have {without}"
    assert told(rows, bare, silent)[-1] == f"Uploads have {without}"
    assert "rivacy" not in " ".join(told(rows, silent))


# -- large and unfinished runs ----------------------------------------------------------------------------------------


def test_of_many_clients_some_are_shown_from_the_worst_to_the_best(comparison, shown, monkeypatch):
    monkeypatch.setattr(report_data, "MOST_CLIENTS", 3)
    data = collect(find_runs(comparison.folder))
    first = comparison.run(shown["methods"][0]["label"], 0)  # by its first seed
    scores = first.clients.filter(pc.field("round") == first.best_on_validation("pre")["round"])["pre_acc"].to_numpy()
    order = np.argsort(scores, kind="stable")
    assert data["partition"]["ids"] == sorted(order[[0, 2, 4]].tolist())
    assert data["partition"]["clients"] == 5
    assert data["partition"]["names"] == [NAMES[i] for i in data["partition"]["ids"]]
    for some, everyone in zip(data["methods"], shown["methods"], strict=True):
        assert some["final"]["pre"]["mean"] == [everyone["final"]["pre"]["mean"][i] for i in data["partition"]["ids"]]
        assert some["final"]["pre"]["score"] == everyone["final"]["pre"]["score"]  # of all clients
    assert data["tables"] == shown["tables"]


def test_of_many_rounds_some_are_shown_and_the_last_one(comparison, monkeypatch):
    monkeypatch.setattr(report_data, "MOST_CELLS", 5 * 3 * 3 * 2)  # clients, methods, views, and two of three rounds
    monkeypatch.setattr(report_data, "MOST_POINTS", 2)
    data = collect(find_runs(comparison.folder))
    for each in data["methods"]:
        assert each["rounds"] == each["axes"]["rounds"] == [1, 3]
        assert all(len(decoded(packed, 5)) == 2 for packed in each["scores"].values())


def test_a_run_that_goes_on(tmp_path):
    data = make_federation((20, 30), dtype=torch.float32)
    settings = {"rounds": 4, "checkpoint_every": 1, **SMALL}
    with pytest.raises(Crash):
        fedloom.run("fedavg", data, out=tmp_path / "runs" / "a", on_round=crash_after(3), **settings)
    (tmp_path / "runs" / "b").mkdir()
    shutil.copy(tmp_path / "runs" / "a" / "config.yaml", tmp_path / "runs" / "b")
    found = find_runs(tmp_path / "runs")
    assert about_progress(found) == "1 run not finished, 1 run without saved rounds"
    collected = collect(found)
    assert collected["methods"][0]["rounds"][-1] == collected["runs"][0]["round"] < 4
    assert collected["methods"][0]["confusion"] is None  # these are computed at the end
    assert "1 run not finished" in write_report(tmp_path / "runs").read_text()


def test_runs_of_a_comparison_that_have_not_begun(comparison, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(comparison.folder, folder)
    labels = comparison.config["methods"]
    assert [method["label"] for method in collect(find_runs(folder))["methods"]] == labels
    shutil.rmtree(folder / "runs" / "plgu-lf")
    found = find_runs(folder)
    assert about_progress(found) == "2 runs without saved rounds"
    assert list(dict.fromkeys(run.label for run in found.runs)) == [label for label in labels if label != "plgu-lf"]
    shutil.rmtree(folder / "runs")
    with user_error("has no results yet"):
        find_runs(folder)


def test_several_runs_of_a_method_are_named_by_what_differs(tmp_path):
    data = make_federation((20, 30), dtype=torch.float32)
    for k, lam in enumerate((0.5, 2.0)):
        for seed in (0, 1):
            fedloom.run("ditto", data, rounds=1, lam=lam, seed=seed, out=tmp_path / f"{k}-{seed}", **SMALL)
    data = collect(find_runs(tmp_path))
    assert [(m["label"], m["seeds"]) for m in data["methods"]] == [("ditto:lam=0.5", [0, 1]), ("ditto:lam=2.0", [0, 1])]


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_complete_and_has_the_names_as_text(comparison, shown):
    path = write_report(comparison.folder)
    assert path == comparison.folder / "report.html"
    text = path.read_text()
    assert text.count("</script>") == text.count("<script") == 5  # the data, Vega, Vega-Lite, charts, page
    assert not re.search(r"<(?:script|img|iframe|link)[^>]* (?:src|href)=(?!\"data:)", text)
    (stored,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert "<" not in stored
    again = json.loads(stored)
    assert again["partition"]["names"] == list(NAMES)
    assert {**again, "made": ""} == {**json.loads(json.dumps(shown)), "made": ""}
    assert "connect-src 'none'" in text
    assert html.escape(shown["title"]) in text
    assert len(text) < 2e6


def test_titles_are_escaped_and_nothing_is_replaced_in_data():
    text = page({"title": "<b>&", "x": "@@SCRIPTS@@ </script>"})
    assert "<title>&lt;b&gt;&amp;</title>" in text
    assert "@@SCRIPTS@@ \\u003c/script>" in text


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_folders_without_results(tmp_path, comparison, numbers):
    with user_error("There is no folder", "nothing"):
        write_report(tmp_path / "nothing")
    with user_error("There are no runs in"):
        write_report(tmp_path)
    (tmp_path / "file").write_text("")
    with user_error("There is no folder", "file"):
        write_report(tmp_path / "file")
    (tmp_path / "run").mkdir()
    shutil.copy(numbers.folder / "config.yaml", tmp_path / "run")
    with user_error("no results yet"):
        write_report(tmp_path)
    with user_error("is a folder", "report.html"):
        write_report(comparison.folder, tmp_path)
    with user_error("There is no folder", "missing"):
        write_report(comparison.folder, tmp_path / "missing" / "page.html")


def test_runs_on_different_tasks(tmp_path, numbers, comparison):
    shutil.copytree(numbers.folder, tmp_path / "a")
    shutil.copytree(comparison.folder / "runs" / "plgu-lf" / "seed-0", tmp_path / "b")
    with user_error("cannot be compared", "the metric differs (rmse and accuracy)"):
        write_report(tmp_path)
    shutil.rmtree(tmp_path / "a")
    other = make_federation((20, 30), dtype=torch.float32)
    fedloom.run("fedavg", other, rounds=1, out=tmp_path / "c", **SMALL)
    with user_error("cannot be compared", "the division of the data differs"):
        write_report(tmp_path)


FILES = (
    "config.yaml", "plan.json", "partition.parquet", "names.json", "rounds.parquet", "clients.parquet",
    "reports.parquet", "timings.parquet", "metrics.parquet", "environment.json", "summary.json", "manifest.json",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_reported(tmp_path, comparison, name):
    folder = shutil.copytree(comparison.folder / "runs" / "plgu-lf" / "seed-0", tmp_path / "run")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with user_error("damaged"):
        write_report(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("name", ["clients.parquet", "reports.parquet", "timings.parquet", "partition.parquet"])
def test_a_missing_table_is_reported(tmp_path, comparison, name):
    folder = shutil.copytree(comparison.folder / "runs" / "plgu-lf" / "seed-0", tmp_path / "run")
    (folder / name).unlink()
    with user_error(name):
        write_report(folder)


def test_a_run_without_metrics_has_no_confusion(tmp_path, comparison):
    folder = shutil.copytree(comparison.folder / "runs" / "plgu-lf" / "seed-0", tmp_path / "run")
    make_unfinished(folder)
    manifest = Manifest(folder)
    manifest.load()
    manifest.remove(["metrics.parquet"])
    data = collect(find_runs(folder))
    assert (data["methods"][0]["confusion"], data["methods"][0]["reliability"]) == (None, None)
    assert data["progress"] == "1 run not finished"


# -- the command line -------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, comparison, numbers, monkeypatch, capsys):
    code, out, err = run_cli(monkeypatch, capsys, "report", numbers.folder, "--out", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert out == f"Report: {tmp_path / 'page.html'}\n"
    assert read_json(comparison.folder / "manifest.json")["files"].keys().isdisjoint({"report.html"})
    assert read_table(numbers.folder / "rounds.parquet").num_rows == 3  # nothing in the run has changed
    for args, words in (
        (["report", tmp_path / "nothing"], "There is no folder"),
        (["report", tmp_path], "There are no runs in"),
        (["report", numbers.folder, "--port", "80"], "needs --live"),
        (["report", numbers.folder, "--live", "--port", "65536"], "from 0 to 65535"),
        (["report", numbers.folder, "--live", "--out", "x.html"], "exclude each other"),
        (["report", tmp_path / "nothing", "--live"], "There is no folder"),
    ):
        code, out, err = run_cli(monkeypatch, capsys, *args)
        assert (code, out) == (2, "")
        assert words in " ".join(err.split())
        assert len(re.findall(r"[.?!](?:\s|$)", " ".join(err.split()))) == 1, err


def test_other_commands_write_the_page_too(tmp_path, monkeypatch, capsys):
    settings = ["--dataset", "digits", "--clients", 3, "--rounds", 1, "--device", "cpu"]
    grid = ["--grid", "lr=0.1,0.2", "--out", tmp_path / "sweep"]
    code, out, _ = run_cli(monkeypatch, capsys, "sweep", "fedavg", *settings, *grid)
    assert code == 0
    assert f"Report: {tmp_path / 'sweep' / 'report.html'}" in "".join(out.split("\n"))
    methods = collect(find_runs(tmp_path / "sweep"))["methods"]
    assert {method["label"] for method in methods} == {"fedavg:lr=0.1", "fedavg:lr=0.2"}
    assert (tmp_path / "sweep" / "report.html").stat().st_size > 500_000


def test_a_page_that_cannot_be_written_does_not_change_how_a_command_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fedloom.studies.report.collect", lambda found: 1 / 0)
    settings = ["--dataset", "digits", "--clients", 3, "--rounds", 1, "--device", "cpu", "--out", tmp_path / "run"]
    code, _, err = run_cli(monkeypatch, capsys, "run", "fedavg", *settings)
    assert code == 0
    assert "was not written: division by zero" in " ".join(err.split())
