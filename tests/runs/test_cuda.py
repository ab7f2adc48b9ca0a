"""On a GPU, a run that died and was resumed gives the same bytes, with deterministic algorithms switched on."""

import numpy as np
import pytest
import torch
from kills import SAME, live

import fedloom

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Crash(Exception):
    pass


@pytest.mark.parametrize("model", ["mlp", "cnn8"])
@pytest.mark.parametrize("name", ["fedrep", "ditto", "scaffold"])
def test_a_resumed_run_equals_one_that_was_not_stopped(name, model, tmp_path):
    settings = {
        "rounds": 6, "clients": 8, "participation": 0.5, "model": model, "device": "cuda", "plan": "stacked",
        "deterministic": True, "checkpoint_every": 1,
    }  # fmt: skip
    fedloom.run(name, out=tmp_path / "whole", **settings)

    def on_round(done, total, row):
        if done == 4:
            raise Crash

    with pytest.raises(Crash):
        fedloom.run(name, out=tmp_path / "run", on_round=on_round, **settings)
    fedloom.run(name, out=tmp_path / "run", resume=True, **settings)
    for file in SAME:
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_kills_of_real_processes_change_nothing(tmp_path):
    command = [
        "run", "fedrep", "--device", "cuda", "--plan", "stacked", "--rounds", "40", "--clients", "8",
        "--participation", "0.5", "--set", "deterministic=true", "--set", "checkpoint_every=1",
    ]  # fmt: skip
    assert live([*command, "--out", str(tmp_path / "whole")]) == 0
    folder, draw = tmp_path / "run", np.random.default_rng(0)
    assert live([*command, "--out", str(folder)], at=200) == -9
    for _ in range(4):
        assert live(["run", "--resume", str(folder)], at=int(draw.integers(20, 150))) == -9
    assert live(["run", "--resume", str(folder)]) == 0
    for file in SAME:
        assert (folder / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
