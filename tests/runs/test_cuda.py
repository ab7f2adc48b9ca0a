"""On a GPU, a run that died and was resumed gives the same bytes, with deterministic algorithms switched on."""

import pytest
import torch

import fedloom

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SAME = ("final/server.safetensors", "final/clients.safetensors", "rounds.parquet", "clients.parquet", "summary.json")


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
