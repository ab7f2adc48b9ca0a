"""Comparisons: what is compared with what, the leaderboard against single runs, and folders that can be continued."""

import csv

import numpy as np
import pytest
from helpers import CrashAt, Seen, make_federation, run_cli
from sentences import user_error

import fedloom
from fedloom.algorithms.ditto import Ditto
from fedloom.algorithms.fedavg_ft import FedAvgFT
from fedloom.algorithms.local import Local
from fedloom.studies.compare import (
    carry_out,
    compare,
    configurations,
    label,
    parse_method,
    parse_seeds,
    read_comparison,
    score,
)

TASK = {
    "dataset": "synthetic", "per_client": 60, "model": "mlp", "width": 8, "clients": 5, "rounds": 2, "plan": "stacked",
    "dtype": "float64",
}  # fmt: skip
QUICK = {**TASK, "plan": "auto", "engine": "reference", "rounds": 1}
ASKED = ("fedavg", "ditto:lam=0.5")
LABELS = ["local", "fedavg", "ditto:lam=0.5"]


def key(row):
    return row["method"], row["model"], row["selection"]


def without_times(board):
    return {key(row): {k: v for k, v in row.items() if not k.endswith("_seconds")} for row in board}


def files(folder):
    """Contents and times of all files below a folder."""
    return {f.relative_to(folder): (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished comparison in a folder."""
    return compare(ASKED, seeds=2, out=tmp_path_factory.mktemp("done") / "mine", **TASK)


@pytest.fixture(scope="module")
def singles(done):
    """The runs of the comparison by method and seed, loaded from their directories."""
    folders = {"local": "local", "fedavg": "fedavg", "ditto:lam=0.5": "ditto_lam=0.5"}
    return {
        (name, seed): fedloom.load(done.folder / "runs" / folder / f"seed-{seed}")
        for name, folder in folders.items()
        for seed in (0, 1)
    }


def test_the_public_function_is_there_however_often_it_is_asked_for():
    """A module of the same name would hide it as soon as that is imported."""
    assert [fedloom.compare, fedloom.compare] == [compare, compare]


def of_methods(rows):
    return [row for row in rows if row["method"] != "majority"]


def test_ranks_follow_the_means_and_methods_that_differ_by_chance_share_them(done):
    rows = done.rows()
    ranks = [row["rank"] for row in rows]
    assert ranks[0] == 1
    assert ranks == sorted(ranks)
    assert all(rank <= place + 1 for place, rank in enumerate(ranks))
    best = rows[0]
    assert (best["to_best"], best["better_than_best"]) == (0, 0)
    for row in rows[1:]:
        assert row["to_best"] == pytest.approx(row["acc_mean"] - best["acc_mean"], abs=1e-6)
        assert row["to_best_low"] <= row["to_best"] <= row["to_best_high"]


def test_the_majority_baseline_predicts_each_clients_most_frequent_class(done):
    """Its accuracy is the share of test samples that are of the class most frequent in training."""
    data = fedloom.run("local", **TASK).simulation.population.data
    shares = []
    for train, test in zip(data.splits["train"].lists(), data.splits["test"].lists(), strict=True):
        most = data.y[train].bincount(minlength=data.classes).argmax()
        shares.append(100 * float((data.y[test] == most).double().mean()))
    (row,) = [row for row in done.rows() if row["method"] == "majority"]
    assert row["acc_mean"] == pytest.approx(np.mean(shares), rel=1e-12)
    assert row["acc_worst"] == pytest.approx(min(shares), rel=1e-12)
    assert (row["bytes_up"], row["auroc_mean"]) == (0, 50)


def test_local_is_always_among_the_methods(done):
    assert done.config["methods"] == LABELS
    assert {row["method"] for row in done.board} == {*LABELS, "majority"}


def test_local_is_not_added_twice():
    found = compare(["fedavg", "local"], seeds=1, **QUICK)
    assert sorted(row["method"] for row in found.rows()) == ["fedavg", "local", "majority"]


def test_means_and_standard_deviations_are_those_of_single_runs(done, singles):
    for row in of_methods(done.rows()):
        means = [singles[row["method"], seed].best_on_validation()["pre_acc_mean"] for seed in (0, 1)]
        assert row["seeds"] == 2
        assert row["acc_mean"] == np.mean(means)
        assert row["acc_mean_std"] == pytest.approx(abs(means[0] - means[1]) / np.sqrt(2), rel=1e-9)
        rounds = [singles[row["method"], seed].best_on_validation()["round"] for seed in (0, 1)]
        assert row["round"] == np.mean(rounds)


@pytest.mark.parametrize("metric", ["acc_weighted", "acc_low5", "acc_top5", "acc_worst", "client_acc_std"])
def test_every_metric_of_the_last_round_is_that_of_single_runs(metric, done, singles):
    for row in of_methods(done.rows(selection="last")):
        assert row["round"] == 2
        assert row[metric] == np.mean([singles[row["method"], seed].last()[f"pre_{metric}"] for seed in (0, 1)])


def accuracies(result, view, t):
    return {row["client"]: row[f"{view}_acc"] for row in result.clients.to_pylist() if row["round"] == t}


@pytest.mark.parametrize("view", ["pre", "global"])
def test_gain_and_harm_are_those_of_the_same_clients_in_single_runs(view, done, singles):
    (row,) = [r for r in done.rows(view) if r["method"] == "ditto:lam=0.5"]
    gains, harmed = [], []
    for seed in (0, 1):
        mine, local = singles["ditto:lam=0.5", seed], singles["local", seed]
        a = accuracies(mine, view, mine.best_on_validation(view)["round"])
        b = accuracies(local, "pre", local.best_on_validation("pre")["round"])
        assert len(a) == len(b) == 5
        gains.append(sum(a[i] - b[i] for i in b) / 5)
        harmed.append(100 * sum(a[i] < b[i] for i in b) / 5)
    assert row["gain"] == pytest.approx(np.mean(gains), abs=1e-9)
    assert row["harmed"] == pytest.approx(np.mean(harmed), abs=1e-9)


def test_costs_are_those_of_a_round(done, singles):
    rows = {row["method"]: row for row in of_methods(done.rows())}
    for name, row in rows.items():
        last = singles[name, 0].last()
        assert (row["bytes_down"], row["bytes_up"]) == (last["bytes_down"], last["bytes_up"])
        assert row["train_seconds"] > 0
    assert rows["fedavg"]["bytes_up"] > rows["local"]["bytes_up"] == 0


def test_in_memory_and_in_a_folder_the_board_is_the_same(tmp_path):
    memory, folder = compare(ASKED, seeds=2, **QUICK), compare(ASKED, seeds=[0, 1], out=tmp_path / "mine", **QUICK)
    assert without_times(memory.board) == without_times(folder.board)
    assert memory.config == folder.config
    assert (memory.folder, folder.folder) == (None, tmp_path / "mine")


def test_the_rows_of_a_view_are_the_best_first(done):
    for view, selection in (("pre", "validation"), ("pre", "last"), ("global", "validation")):
        rows = done.rows(view, selection)
        assert {(row["model"], row["selection"]) for row in rows} == {(view, selection)}
        means = [row["acc_mean"] for row in rows]
        assert means == sorted(means, reverse=True)
    assert "local" not in [row["method"] for row in done.rows("global")]


def test_a_federation_and_methods_given_as_objects_are_compared():
    data = make_federation((20, 30, 40), server=4)
    found = compare([FedAvgFT, Ditto(lam=0.5)], data, seeds=[3], rounds=1, engine="reference")
    assert sorted(row["method"] for row in found.rows()) == ["ditto:lam=0.5", "fedavg-ft", "local", "majority"]
    assert found.config["dataset"] == {"name": "Federation", "own": True}


def test_a_sample_of_clients_is_paired_with_the_same_sample():
    found = compare(["fedavg"], seeds=2, eval_clients=2, **QUICK)
    assert all("gain" in row for row in found.rows())


def test_clients_without_test_samples_are_left_out_of_gain_and_harm():
    """make_federation gives client i i % 3 validation samples and one more for testing; here client 0 has none."""
    data = make_federation((20, 20, 20))
    data.splits["test"] = fedloom.Ragged.of([np.zeros(0, int), *data.splits["test"].lists()[1:]])
    found = compare(["fedavg"], data, seeds=1, rounds=1, engine="reference")
    assert all(np.isfinite(row["gain"]) and row["harmed"] in (0, 50, 100) for row in found.board)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        (Local(), "local"),
        (Ditto(), "ditto"),
        (Ditto(lam=0.1), "ditto"),  # its default
        (Ditto(lam=0.5), "ditto:lam=0.5"),
        (Ditto(lam=1e-5, personal_epochs=2), "ditto:lam=1e-05,personal_epochs=2"),
        (FedAvgFT(ft_scope="head"), "fedavg-ft:ft_scope=head"),
    ],
)
def test_a_label_names_the_method_and_what_is_not_default_so_that_it_can_be_asked_for(algorithm, text):
    assert label(algorithm) == text
    (config,) = configurations([text], {})
    assert config.algorithm == algorithm


def test_spaces_around_settings_do_not_matter():
    assert parse_method("ditto: lam = 0.5 , personal_epochs=2") == {
        "name": "ditto", "lam": "0.5", "personal_epochs": "2",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["ditto:", "ditto:lam", "ditto:=3", "ditto:lam=0.5,", "ditto:lam=0.5,x"])
def test_a_method_with_settings_that_are_none_is_refused(text):
    with user_error("'ditto:lam=0.5,personal_epochs=2'", f"'{text}'"):
        parse_method(text)


@pytest.mark.parametrize(("text", "twice"), [("ditto:lam=1,lam=2", "'lam'"), ("ditto:name=local", "'name'")])
def test_a_setting_of_a_method_is_given_once(text, twice):
    with user_error("twice", twice):
        parse_method(text)


def test_settings_of_a_method_count_more_than_those_for_all():
    """`lam` for all, and one method that has its own."""
    first, second = configurations(["ditto", "ditto:lam=0.5"], {"lam": 0.3})
    assert (first.algorithm.lam, second.algorithm.lam) == (0.3, 0.5)
    found = compare(["ditto:lam=0.5"], seeds=1, lam=0.3, **QUICK)
    assert "ditto:lam=0.5" in {row["method"] for row in found.board}


@pytest.mark.parametrize(
    ("methods", "name"),
    [
        (["ditto", "fedavg", "ditto"], "'ditto'"),
        (["ditto", "ditto:lam=0.1"], "'ditto'"),  # the default
        (["ditto:lam=0.5", Ditto(lam=0.5)], "'ditto:lam=0.5'"),
        (["ditto:lam=0.5", "ditto:lam=5e-1"], "'ditto:lam=0.5'"),
        (["local", "local"], "'local'"),
    ],
)
def test_a_method_asked_for_twice_is_refused(methods, name):
    with user_error(name, "twice"):
        compare(methods, **QUICK)


def test_the_same_method_with_different_settings_is_two():
    found = compare(["ditto", "ditto:lam=0.5"], seeds=1, **QUICK)
    assert sorted(row["method"] for row in found.rows()) == ["ditto", "ditto:lam=0.5", "local", "majority"]


def test_no_method_is_no_comparison():
    with user_error("at least one method"):
        compare([], **QUICK)


def test_a_configuration_with_an_algorithm_is_that_of_a_single_run():
    with user_error("methods instead of an algorithm"):
        configurations(["ditto"], {"algorithm": {"name": "ditto"}})


@pytest.mark.parametrize(
    ("seeds", "found"),
    [
        (3, [0, 1, 2]),
        ("3", [0, 1, 2]),
        (1, [0]),
        ("4,7,9", [4, 7, 9]),
        ("4, 7, 9", [4, 7, 9]),
        ("9,4", [9, 4]),
        ("5,", [5]),  # which one, not how many
        ([5], [5]),
        ((4, 7), [4, 7]),
        (range(2, 4), [2, 3]),
        ([0], [0]),
    ],
)
def test_seeds_are_how_many_or_which(seeds, found):
    assert parse_seeds(seeds) == found


@pytest.mark.parametrize("seeds", [0, "0", -1, "-1", "x", "", "1.5", "4,x", "4,,7", [4, 4], "4,4", [], [-1], None, 2.0])
def test_other_seeds_are_refused(seeds):
    with user_error("how many (3) or which ones (4,7,9)", f"'{seeds}'"):
        parse_seeds(seeds)


MISTAKES = {
    "unknown method": (["fedavg", "dito"], {}, ["did you mean 'ditto'?"]),
    "unknown setting": (["fedavg", "ditto:lamb=1"], {}, ["'lamb'", "did you mean 'lam'?"]),
    "value out of range": (["fedavg", "ditto:lam=-1"], {}, ["lam must be at least 0"]),
    "setting that not all have": (["ditto", "fedavg"], {"lam": 1}, ["Unknown setting 'lam'"]),
    "method and task": (["fedavg", "scaffold"], {"momentum": 0.9}, ["momentum=0"]),
    "method and model": (["fedavg", "fedper"], {"model": "logreg", "width": None}, ["allow_degenerate"]),
    "task": (["fedavg"], {"participation": 30}, ["30 clients, but there are 5"]),
    "evaluation": (["fedavg"], {"eval_clients": 6}, ["eval_clients asks for 6"]),
    "twice": (["fedavg", "fedavg"], {}, ["twice"]),
    "seeds": (["fedavg"], {"seeds": "x"}, ["'x'"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_any_method_shows_before_anything_is_trained_or_written(mistake, tmp_path):
    methods, values, words = MISTAKES[mistake]
    values = {k: v for k, v in {**QUICK, **values}.items() if v is not None}
    seen = Seen()
    with user_error(*words):
        compare(methods, out=tmp_path / "runs" / "mine", callbacks=[seen], **values)
    assert seen.events == []
    assert list(tmp_path.iterdir()) == []


def test_resume_needs_a_folder():
    with user_error("resume needs out"):
        compare(ASKED, resume=True, **QUICK)


def test_a_folder_holds_the_configuration_the_runs_and_three_leaderboards(done):
    expected = ["compare.yaml", "leaderboard.csv", "leaderboard.md", "leaderboard.tex", "manifest.json", "runs"]
    assert sorted(f.name for f in done.folder.iterdir()) == expected
    with (done.folder / "leaderboard.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(key(row), float(row["acc_mean"])) for row in rows] == [(key(row), row["acc_mean"]) for row in done.board]
    for name in ("leaderboard.md", "leaderboard.tex"):
        text = (done.folder / name).read_text(encoding="utf-8")
        assert all(method in text for method in LABELS)


def test_the_configuration_in_the_folder_asks_for_the_same_comparison(done):
    methods, seeds, config = read_comparison(done.folder)
    assert (methods, seeds) == (LABELS, [0, 1])
    assert {"methods": methods, "seeds": seeds, **config} == done.config
    configs = configurations(methods, config)
    assert [label(config.algorithm) for config in configs] == LABELS
    assert {(c.settings.clients, c.settings.plan, c.dataset.per_client, c.model.width) for c in configs} == {
        (5, "stacked", 60, 8)
    }


def test_stacked_seeds_give_what_single_runs_give(singles):
    """Up to rounding: a stack of two runs has other shapes than a single run, so bits are not promised."""
    for (name, seed), stacked in singles.items():
        method, _, settings = name.partition(":")
        single = fedloom.run(method, seed=seed, **({"lam": 0.5} if settings else {}), **TASK)
        assert stacked.config == single.config
        assert len(stacked.rounds) == len(single.rounds) == 2
        for a, b in zip(stacked.rounds, single.rounds, strict=True):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9)


def test_a_finished_comparison_is_not_trained_again(done):
    before = files(done.folder / "runs")
    seen = Seen()
    again = compare(ASKED, seeds=2, out=done.folder, resume=True, callbacks=[seen], **TASK)
    assert again.board == done.board  # with the times: they are those of the runs
    assert again.config == done.config
    assert files(done.folder / "runs") == before
    assert seen.events == []


def test_callbacks_see_the_runs_of_a_method_and_how_many_methods_are_done():
    started = []

    class Titles(fedloom.Callback):
        def on_setup(self, run):
            started.append((run.name, run.seed, run.group, run.together))

    compare(["fedavg"], seeds="4,2", callbacks=[Titles()], **QUICK)
    assert started == [
        ("local", 4, (1, 2), 2), ("local", 2, (1, 2), 2), ("fedavg", 4, (2, 2), 2), ("fedavg", 2, (2, 2), 2)
    ]  # fmt: skip


def test_an_interrupted_comparison_is_resumed_where_it_was(tmp_path):
    """Stopped in the first round of the second of three methods: the two runs of the first are kept as they are."""
    folder, task = tmp_path / "mine", {**QUICK, "rounds": 2}
    with pytest.raises(KeyboardInterrupt):
        compare(ASKED, seeds=2, out=folder, callbacks=[CrashAt(LABELS[1], 1, KeyboardInterrupt)], **task)
    assert not (folder / "leaderboard.csv").exists()
    finished = {p.parent: files(p.parent) for p in folder.glob("runs/*/*/summary.json")}
    assert len(finished) == 2
    found = compare(ASKED, seeds=2, out=folder, resume=True, **task)
    assert {place: files(place) for place in finished} == finished
    assert without_times(found.board) == without_times(compare(ASKED, seeds=2, **task).board)
    assert (folder / "leaderboard.csv").exists()


def test_objects_can_be_resumed_with_the_same_objects(tmp_path):
    data = make_federation((20, 30, 40))
    settings = {"seeds": [3], "rounds": 1, "engine": "reference", "out": tmp_path / "mine"}
    first = compare([Ditto(lam=0.5)], data, **settings)
    assert compare([Ditto(lam=0.5)], data, resume=True, **settings).board == first.board


CHANGES = {
    "other methods": ({"methods": ["fedavg"]}, ["methods="]),
    "another order": ({"methods": ["ditto:lam=0.5", "fedavg"]}, ["methods="]),
    "other settings of a method": ({"methods": ["fedavg", "ditto:lam=0.6"]}, ["methods=", "lam=0.6"]),
    "other seeds": ({"seeds": 3}, ["seeds=[0, 1], not [0, 1, 2]"]),
    "another setting": ({"lr": 0.5}, ["lr=0.1, not 0.5"]),
    "another model": ({"width": 9}, ["model.width=8, not 9"]),
    "other data": ({"per_client": 61}, ["dataset.per_client=60, not 61"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_resuming_something_else_is_refused(change, done):
    changed, words = CHANGES[change]
    before = files(done.folder)
    with user_error(str(done.folder), "was started with", *words):
        compare(**{"methods": ASKED, "seeds": 2, **TASK, **changed}, out=done.folder, resume=True)
    assert files(done.folder) == before


def test_a_folder_in_use_is_not_written_to(done):
    before = files(done.folder)
    with user_error(str(done.folder), "in use already", "--resume"):
        compare(ASKED, seeds=2, out=done.folder, **TASK)
    assert files(done.folder) == before


def test_a_folder_with_other_things_is_not_written_to(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with user_error(str(tmp_path), "not empty"):
        compare(ASKED, out=tmp_path, **QUICK)
    with user_error(str(tmp_path), "not a comparison", "compare.yaml"):
        compare(ASKED, out=tmp_path, resume=True, **QUICK)
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with user_error("is a file"):
        compare(ASKED, out=tmp_path / "file", **QUICK)
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_there_is_nothing_to_read_where_no_folder_is(tmp_path):
    with user_error("There is no comparison", "nowhere"):
        read_comparison(tmp_path / "nowhere")


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resume"])
@pytest.mark.parametrize("name", ["", "a/new/one"], ids=["empty", "not there"])
def test_a_folder_may_be_empty_or_not_exist_yet(name, resume, tmp_path):
    """Also to resume: a script need not know whether it was stopped before it began."""
    compare(["local"], seeds=1, out=tmp_path / name, resume=resume, **QUICK)
    assert (tmp_path / name / "leaderboard.csv").exists()


def test_the_folder_of_a_single_run_is_no_comparison(tmp_path):
    fedloom.run("fedavg", out=tmp_path / "one", **QUICK)
    before = files(tmp_path)
    with user_error("single run", "fedloom run --resume"):
        compare(["fedavg"], out=tmp_path / "one", resume=True, **QUICK)
    with user_error("in use already"):
        compare(["fedavg"], out=tmp_path / "one", **QUICK)
    assert files(tmp_path) == before


def test_the_folder_of_a_comparison_is_no_single_run(done):
    before = files(done.folder)
    with user_error("holds a comparison", "fedloom compare --resume"):
        fedloom.run("fedavg", out=done.folder, resume=True, **TASK)
    with user_error("in use already"):
        fedloom.run("fedavg", out=done.folder, **TASK)
    assert files(done.folder) == before


@pytest.mark.parametrize("text", ["lr: 0.1\n", "methods: ditto\nseeds: [0]\n", "methods: [ditto]\nseeds: 3\n"])
def test_a_folder_whose_list_of_methods_and_seeds_is_gone_is_damaged(text, tmp_path):
    (tmp_path / "compare.yaml").write_text("fedloom: {format: 1}\n" + text)
    with user_error(str(tmp_path), "damaged", "methods and seeds"):
        read_comparison(tmp_path)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that asks for a comparison, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "methods: [fedavg]\nseeds: [5]\nrounds: 1\nclients: 5\nengine: reference\n"
        "dataset: {name: synthetic, per_client: 60}\n"
    )
    return path


def test_a_file_names_methods_and_seeds(file, monkeypatch, capsys):
    code, _, err = run_cli(monkeypatch, capsys, "compare", "--config", str(file), "--out", "mine")
    assert (code, err) == (0, "")
    methods, seeds, _ = read_comparison(file.parent / "mine")
    assert (methods, seeds) == (["local", "fedavg"], [5])


def test_methods_and_seeds_of_the_command_line_count_more_than_the_files(file, monkeypatch, capsys):
    code, _, err = run_cli(
        monkeypatch, capsys, "compare", "ditto", "--seeds", "7,", "--config", str(file), "--out", "mine"
    )
    assert (code, err) == (0, "")
    methods, seeds, _ = read_comparison(file.parent / "mine")
    assert (methods, seeds) == (["local", "ditto"], [7])


@pytest.mark.parametrize(
    ("line", "words"), [("methods: 5", "methods"), ("methods: [5]", "'[5]'"), ("seeds: 0", "'0'"), ("seeds: x", "'x'")]
)
def test_methods_and_seeds_that_are_none_get_one_sentence(line, words, file, monkeypatch, capsys):
    name = line.partition(":")[0]
    kept = [text for text in file.read_text().splitlines() if not text.startswith(name)]
    file.write_text("\n".join([*kept, line]))
    code, out, err = run_cli(monkeypatch, capsys, "compare", "--config", str(file), "--out", "mine")
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not (file.parent / "mine").exists()


def test_a_comparison_is_resumed_with_nothing_but_its_folder(done, monkeypatch, capsys):
    before = files(done.folder / "runs")
    board = (done.folder / "leaderboard.csv").read_text()
    code, out, err = run_cli(monkeypatch, capsys, "compare", "--resume", str(done.folder))
    assert (code, err) == (0, "")
    assert all(method in out for method in ("local", "fedavg", "ditto"))
    assert files(done.folder / "runs") == before
    assert (done.folder / "leaderboard.csv").read_text() == board


def test_a_comparison_has_seeds_instead_of_a_seed():
    with user_error("seeds instead of a seed"):
        compare(["fedavg"], seed=4)
    with user_error("seeds instead of a seed"):
        configurations(["fedavg"], {"seed": "4"})


def test_one_method_needs_no_list():
    rows = compare("fedavg", seeds=1, clients=5, rounds=1, plan="stacked-eager").rows()
    assert {row["method"] for row in rows} == {"local", "fedavg", "majority"}


def test_without_validation_data_the_last_round_counts():
    found = compare(["fedavg"], seeds=1, clients=5, rounds=2, split=(0.7, 0, 0.3), plan="stacked-eager")
    assert {row["selection"] for row in found.board} == {"last"}
    assert [row["round"] for row in of_methods(found.rows())] == [2, 2]


def test_settings_for_one_method_are_kept_in_the_folder(tmp_path):
    """A learning rate of its own is no setting of the method, so the label does not contain it."""
    config = {**QUICK, "per_method": {"ditto": {"lr": 0.02, "lam": 0.5}}}
    configs = configurations(["fedavg", "ditto"], config)
    assert [config.settings.lr for config in configs] == [0.1, 0.02]
    first = carry_out(configs, [0], out=tmp_path / "mine")
    methods, seeds, before = read_comparison(tmp_path / "mine")
    assert methods == ["local", "fedavg", "ditto:lam=0.5"]
    assert [config.settings.lr for config in configurations(methods, before)] == [0.1, 0.1, 0.02]
    again = carry_out(configurations(methods, before), seeds, out=tmp_path / "mine", resume=True)
    assert again.board == first.board


def test_the_time_of_an_evaluation_is_that_of_rounds_with_one():
    result = fedloom.run("local", **{**QUICK, "rounds": 5, "eval_every": 5})
    assert score("local", 0, result).eval_seconds == result.timings[-1]["eval_seconds"]


def test_a_method_that_needs_data_at_the_server_gets_some_and_all_have_the_same_division():
    alone = fedloom.run("page", rounds=1, clients=4, ep_max=1)
    assert alone.config["server_share"] == 0.1
    found = fedloom.compare(["page:ep_max=1", "fedavg"], seeds=1, rounds=1, clients=4)
    assert found.config["server_share"] == 0.1
    assert "per_method" not in found.config
    assert fedloom.run("page", "synthetic", rounds=1, clients=4, ep_max=1).config["server_share"] == 0.0
    with user_error("page needs data at the server", "server_share=0.1"):
        fedloom.run("page", rounds=1, clients=4, server_share=0)
