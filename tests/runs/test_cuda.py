"""On a GPU with deterministic algorithms, a run that crashed or was killed and resumed gives the same bytes."""

import numpy as np
import pytest
import torch
from helpers import Crash, crash_after
from kills import assert_same_files, run_process

import fedloom

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("model", ["mlp", "cnn8"])
@pytest.mark.parametrize("name", ["fedrep", "ditto", "scaffold"])
def test_a_resumed_run_equals_one_that_was_not_stopped(name, model, tmp_path):
    settings = {
        "rounds": 6, "clients": 8, "participation": 0.5, "model": model, "device": "cuda", "plan": "stacked",
        "deterministic": True, "checkpoint_every": 1,
    }  # fmt: skip
    fedloom.run(name, out=tmp_path / "whole", **settings)
    with pytest.raises(Crash):
        fedloom.run(name, out=tmp_path / "run", on_round=crash_after(4), **settings)
    fedloom.run(name, out=tmp_path / "run", resume=True, **settings)
    assert_same_files(tmp_path / "run", tmp_path / "whole")


def test_kills_of_real_processes_change_nothing(tmp_path):
    command = [
        "run", "fedrep", "--device", "cuda", "--plan", "stacked", "--rounds", "40", "--clients", "8",
        "--participation", "0.5", "--set", "deterministic=true", "--set", "checkpoint_every=1",
    ]  # fmt: skip
    assert run_process([*command, "--out", str(tmp_path / "whole")]) == 0
    folder, draw = tmp_path / "run", np.random.default_rng(0)
    assert run_process([*command, "--out", str(folder)], at=200) == -9
    for _ in range(4):
        assert run_process(["run", "--resume", str(folder)], at=int(draw.integers(20, 150))) == -9
    assert run_process(["run", "--resume", str(folder)]) == 0
    assert_same_files(folder, tmp_path / "whole")
