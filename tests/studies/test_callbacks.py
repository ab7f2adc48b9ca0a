"""Callbacks: when they are called, what they see, and how they end runs."""

import json
from pathlib import Path

import pytest
import torch
from helpers import Crash, CrashAt, Seen, run_cli
from kills import assert_same_files
from sentences import user_error

import fedloom
from fedloom.runs.interrupt import Stopped

SMALL = {"dataset": "synthetic", "clients": 4, "per_client": 40, "rounds": 4, "plan": "stacked-eager"}


class Stop(fedloom.Callback):
    """Ends runs after a round."""

    def __init__(self, t, how="stop"):
        self.t, self.how = t, how

    def on_round(self, run):
        if run.round == self.t:
            getattr(run, self.how)()


def test_the_order_of_events():
    seen = Seen()
    fedloom.run("fedavg", callbacks=[seen], eval_every=2, **{**SMALL, "rounds": 3})
    assert [(event, t) for event, *_, t in seen.events] == [
        ("on_setup", 0), ("on_start", 0), ("on_round", 1), ("on_evaluation", 2), ("on_round", 2), ("on_evaluation", 3),
        ("on_round", 3), ("on_end", 3),
    ]  # fmt: skip


def test_what_a_callback_sees_of_a_run(tmp_path):
    found = []

    class Look(fedloom.Callback):
        def on_evaluation(self, run):
            found.append((run.metrics, len(run.history), run.costs[-1]["round"], run.folder, run.metric, run.rounds))
            assert run.config["algorithm"]["name"] == "ditto"
            assert repr(run) == f"TrainingRun(ditto, seed 3, round {run.round} of 2)"

        def on_end(self, run, result):
            found.append(result)

    result = fedloom.run("ditto", callbacks=Look(), seed=3, out=tmp_path / "run", **{**SMALL, "rounds": 2})
    *rounds, at_end = found
    assert [row for row, *_ in rounds] == result.rounds
    assert [rest for _, *rest in rounds] == [[t, t, tmp_path / "run", "accuracy", 2] for t in (1, 2)]
    assert at_end.rounds == result.rounds


@pytest.mark.parametrize("out", [True, False], ids=["folder", "memory"])
def test_models_are_those_of_the_round(out, tmp_path):
    models = {}

    class Take(fedloom.Callback):
        def on_evaluation(self, run):
            models[run.round] = run.model(1), run.global_model()

    where = {"out": tmp_path / "run"} if out else {}
    result = fedloom.run("ditto", callbacks=[Take()], **where, **{**SMALL, "rounds": 2})
    for mine, last in zip(models[2], (result.model(1, "last"), result.global_model("last")), strict=True):
        for name, value in last.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value)
    first, last = (dict(models[t][0].state_dict()) for t in (1, 2))
    assert any(not torch.equal(first[name], last[name]) for name in first)  # it went on to train
    score = result.client_metrics("last")
    assert len(score) == 4


def test_there_are_no_models_before_a_round():
    class Ask(fedloom.Callback):
        def on_start(self, run):
            run.model(0)

    with user_error("no models before the first evaluated round"):
        fedloom.run("fedavg", callbacks=[Ask()], **SMALL)


@pytest.mark.parametrize("out", [True, False], ids=["folder", "memory"])
def test_a_stopped_run_is_finished_with_the_rounds_so_far(out, tmp_path):
    where = {"out": tmp_path / "run"} if out else {}
    result = fedloom.run("ditto", callbacks=[Stop(2)], **where, **SMALL)
    assert result.last()["round"] == 2
    assert result.stopped == "stopped by a callback"
    short = fedloom.run("ditto", **{**SMALL, "rounds": 2})
    assert result.rounds == short.rounds
    for name, value in short.model(0).state_dict().items():
        torch.testing.assert_close(result.model(0).state_dict()[name], value)
    if out:
        assert fedloom.load(tmp_path / "run").stopped == result.stopped
        assert fedloom.run("ditto", **where, resume=True, **SMALL).last()["round"] == 2  # it is finished
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2


def test_a_run_that_is_stopped_where_nothing_is_evaluated_ends_with_an_evaluated_round():
    result = fedloom.run("fedavg", callbacks=[Stop(1)], eval_every=3, **{**SMALL, "rounds": 9})
    assert [row["round"] for row in result.rounds] == [2]


def test_of_stacked_runs_one_is_stopped_and_the_others_go_on_as_without_it():
    class StopOne(fedloom.Callback):
        def on_round(self, run):
            if (run.name, run.seed, run.round) == ("fedavg", 1, 2):
                run.stop("enough")

    found = {}

    class Keep(fedloom.Callback):
        def on_end(self, run, result):
            found[run.name, run.seed] = result

    settings = {**SMALL, "rounds": 6, "eval_every": 3}
    fedloom.compare(["fedavg"], seeds=3, callbacks=[StopOne(), Keep()], **settings)
    assert [row["round"] for row in found["fedavg", 1].rounds] == [3]
    assert found["fedavg", 1].stopped == "enough"
    whole = fedloom.run("fedavg", seed=2, **settings)
    assert [row["round"] for row in found["fedavg", 2].rounds] == [3, 6]
    assert found["fedavg", 2].last() == pytest.approx(whole.last(), rel=1e-5)


def test_a_paused_run_goes_on_as_if_nothing_had_been(tmp_path):
    fedloom.run("ditto", out=tmp_path / "whole", **SMALL)
    with pytest.raises(Stopped, match="stopped after round 2 of 4"):
        fedloom.run("ditto", out=tmp_path / "run", callbacks=[Stop(2, "pause")], **SMALL)
    seen = Seen()
    fedloom.run("ditto", out=tmp_path / "run", resume=True, callbacks=[seen], **SMALL)
    assert seen.of("on_start") == [["ditto", 0, 2]]
    assert_same_files(tmp_path / "run", tmp_path / "whole")
    with user_error("cannot be continued, so it cannot pause; give it a folder"):
        fedloom.run("ditto", callbacks=[Stop(2, "pause")], **SMALL)


@pytest.mark.parametrize("when", ["on_setup", "on_start", "on_evaluation", "on_round", "on_end"])
def test_a_callback_that_raises_leaves_a_run_that_resumes(when, tmp_path):
    class Raise(fedloom.Callback):
        pass

    def fail(self, run, *_):
        if when in ("on_setup", "on_start", "on_end") or run.round == 2:
            raise Crash

    setattr(Raise, when, fail)
    settings = {**SMALL, "checkpoint_every": 1}
    fedloom.run("ditto", out=tmp_path / "whole", **settings)
    with pytest.raises(Crash):
        fedloom.run("ditto", out=tmp_path / "run", callbacks=[Raise()], **settings)
    fedloom.run("ditto", out=tmp_path / "run", resume=True, **settings)
    assert_same_files(tmp_path / "run", tmp_path / "whole")


def test_on_round_ends_a_run_by_returning_true():
    result = fedloom.run("fedavg", on_round=lambda done, total, row: done == 3, **SMALL)
    assert (result.last()["round"], result.stopped) == (3, "on_round returned True")
    assert fedloom.run("fedavg", on_round=lambda *_: 1, **SMALL).last()["round"] == 4  # other values mean nothing
    assert fedloom.run("fedavg", on_round=lambda done, total, row: done == total, **SMALL).stopped == ""


# -- early stopping ----------------------------------------------------------------------------------------------------


def history(*values, every=1):
    return [{"round": every * (i + 1), "pre_val_acc_mean": value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "patience", "min_delta", "every", "stops"),
    [
        ((50, 60, 59, 58), 2, 0, 1, True),
        ((50, 60, 59, 61), 2, 0, 1, False),
        ((50, 60, 60), 1, 0, 1, True),  # equal is not better
        ((50, 60, 60.5, 60.9), 2, 1, 1, True),
        ((50, 60, 60.6, 61.2), 2, 1, 1, False),  # 61.2 is more than 1 above 60
        ((50, 49), 10, 0, 10, True),  # patience is in rounds, whatever is evaluated
        ((50, 49), 11, 0, 10, False),
        ((float("nan"), float("nan")), 2, 0, 1, True),
    ],
)
def test_when_early_stopping_ends_a_run(values, patience, min_delta, every, stops):
    class Run:
        metric, stopped = "accuracy", ""
        history_ = history(*values, every=every)
        history, round = history_, history_[-1]["round"]

        def stop(self, reason):
            self.stopped = reason

    run = Run()
    fedloom.EarlyStopping(patience, min_delta).on_evaluation(run)
    assert bool(run.stopped) == stops


def test_early_stopping_follows_metrics_that_fall():
    rows = [{"round": t + 1, "pre_val_rmse_mean": value} for t, value in enumerate((5.0, 4.0, 3.0))]

    class Run:
        metric, history, round = "rmse", rows, 3

        def stop(self, reason):
            raise AssertionError(reason)

    fedloom.EarlyStopping(1).on_evaluation(Run())


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """A run that early stopping ends, by settings."""
    folder = tmp_path_factory.mktemp("early") / "run"
    settings = {**SMALL, "rounds": 60, "early_stopping": 3, "min_delta": 2, "checkpoint_every": 1}
    return fedloom.run("ditto", out=folder, **settings), settings


def test_early_stopping_as_a_setting_and_as_a_callback_are_the_same(early):
    result, settings = early
    t = result.last()["round"]
    assert 3 < t < 60
    assert result.stopped == f"no better on validation data since round {t - 3}"
    assert "early_stopping: 3" in (result.folder / "config.yaml").read_text()
    plain = {k: v for k, v in settings.items() if k not in ("early_stopping", "min_delta")}
    again = fedloom.run("ditto", callbacks=[fedloom.EarlyStopping(3, 2)], **plain)
    assert again.rounds == result.rounds


def test_a_run_that_is_killed_ends_in_the_same_round(early, tmp_path):
    """Also if it is killed after its last round, when it was about to end."""
    result, settings = early
    for t in (2, result.last()["round"]):
        folder = tmp_path / str(t)
        with pytest.raises(Crash):
            fedloom.run("ditto", out=folder, callbacks=[CrashAt("ditto", t)], **settings)
        again = fedloom.run("ditto", out=folder, resume=True, **settings)
        assert again.rounds == result.rounds
        assert_same_files(folder, result.folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"early_stopping": 0}, ["early_stopping must be at least 1"]),
        ({"min_delta": 0.1}, ["min_delta=0.1 belongs to early stopping", "early_stopping=20"]),
        ({"early_stopping": 2, "split": (0.8, 0, 0.2)}, ["needs validation data", "split=0.7/0.1/0.2"]),
        ({"callbacks": [fedloom.EarlyStopping(2)], "split": (0.8, 0, 0.2)}, ["needs validation data"]),
        ({"callbacks": [print]}, ["not a fedloom.Callback", "derive its class"]),
        ({"callbacks": [fedloom.EarlyStopping]}, ["callbacks has EarlyStopping", "make one: EarlyStopping()"]),
    ],
)
def test_mistakes_get_a_sentence(settings, words):
    with user_error(*words):
        fedloom.run("fedavg", **{**SMALL, **settings})


def test_patience_is_checked():
    with user_error("patience must be at least 1, not 0"):
        fedloom.EarlyStopping(0)
    with user_error("min_delta must be at least 0, not -1"):
        fedloom.EarlyStopping(2, -1)


def test_the_command_line_says_that_a_run_ended_early(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = ["--clients", "5", "--rounds", "40", "--no-save", "--set", "early_stopping=2", "--set", "min_delta=5"]
    code, out, _ = run_cli(monkeypatch, capsys, "run", "fedrep", *options)
    assert code == 0
    assert "of 40 rounds in" in out
    assert "It ended early: no better on validation data since round" in out
    assert not Path("runs").exists()


def test_the_steps_of_planning_are_announced():
    steps = []

    class Planning(fedloom.Callback):
        def on_planning(self, run, step):
            steps.append((run.name, step))

    for plan in ("auto", "stacked"):
        fedloom.run("fedavg", clients=4, rounds=1, plan=plan, callbacks=[Planning()])
    measured = ["timing one client", "measuring memory", "timing stacked clients", "measuring memory"]
    assert steps == [("fedavg", step) for step in measured]
