"""`--devices` of the command line: what is refused, exit codes, and what is printed when a process fails."""

import pytest
from helpers import run_cli

from fedloom.core.errors import UserError, WorkerError
from fedloom.runs.interrupt import Stopped
from fedloom.studies import study

QUICK = ["--rounds", "2", "--clients", "4", "--batch-size", "100", "--plan", "stacked-eager", "--device", "cpu"]
COMPARE = ["compare", "fedavg", "--seeds", "1", *QUICK]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "foo"], "devices has 'foo', which is no device; write GPUs as 0,1"),
        (["--devices", "0,700"], "CUDA device"),
        (["--devices", ""], "devices is empty"),
        (["--devices", "cpu,cpu", "--no-save"], "devices needs a folder"),
        (["--devices", "cpu,cpu", "--engine", "ray"], "leave out either engine or devices"),
        (["--devices", "cpu,cpu", "--tracker", "tensorboard"], "trackers cannot be called"),
    ],
)
@pytest.mark.parametrize(
    "command", [COMPARE, ["sweep", "fedprox", "--grid", "lr=0.1", *QUICK]], ids=["compare", "sweep"]
)
def test_what_does_not_fit_is_refused_with_a_sentence(command, options, said, monkeypatch, capsys, tmp_path):
    code, out, err = run_cli(monkeypatch, capsys, *command, *options)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_device_and_devices_exclude_each_other(monkeypatch, capsys):
    code, _, err = run_cli(monkeypatch, capsys, "compare", "fedavg", "--device", "cuda:0", "--devices", "cpu")
    assert (code, err) == (2, "fedloom: device=cuda:0 and devices=cpu exclude each other; give either.\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("ditto on cuda:1: lr is too large."), 2, ["fedloom: ditto on cuda:1: lr is too large."]),
        (WorkerError("ditto was killed."), 1, ["fedloom: ditto was killed."]),
        (WorkerError("It failed.", "Traceback [0]\n  Key"), 1, ["Traceback [0]", "  Key", "fedloom: It failed."]),
    ],
)
def test_a_process_that_fails_has_the_exit_code_of_an_ordinary_run(error, code, said, monkeypatch, capsys):
    def fail(*given):
        raise error

    monkeypatch.setattr(study, "execute_on_devices", fail)
    found, out, err = run_cli(monkeypatch, capsys, *COMPARE, "--devices", "cpu", "--out", "mine")
    assert (found, out) == (code, "")
    assert err.splitlines() == said


def test_after_ctrl_c_the_ordinary_command_continues(monkeypatch, capsys, tmp_path):
    def stop(items, devices, first, folder, on_progress):
        raise Stopped(folder, 3, 4, all_runs=True)

    with monkeypatch.context() as patched:
        patched.setattr(study, "execute_on_devices", stop)
        code, _, err = run_cli(patched, capsys, *COMPARE, "--devices", "cpu,cpu", "--out", "mine")
    assert code == 130
    assert err.splitlines() == ["Stopped after 3 of 4 rounds.", "Continue with: fedloom compare --resume mine"]
    code, out, err = run_cli(monkeypatch, capsys, "compare", "--resume", "mine", "--devices", "cpu")
    assert (code, err) == (0, "")
    assert "fedavg" in out
    assert (tmp_path / "mine" / "report.html").exists()
