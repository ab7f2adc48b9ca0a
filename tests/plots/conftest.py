"""Results of runs that never took place, with records that a test can compute with by hand."""

import pyarrow as pa
import pytest

from fedloom.studies.result import Result


@pytest.fixture(scope="session")
def made():
    """Returns a result: `scores` are its mean scores by round, `of_clients` the scores of clients 0, 1, ... in round 1,
    which is the best on validation data."""

    def make(method="ditto", seed=0, scores=(50.0, 60.0), of_clients=(), view="pre", metric="accuracy", **more):
        name = {"accuracy": "acc"}.get(metric, metric)
        values = scores if isinstance(scores, dict) else dict(enumerate(scores, 1))
        best = {1: 100.0 if metric != "rmse" else 0.0}
        rounds = [
            {
                "round": t, f"{view}_{name}_mean": value, f"{view}_val_{name}_mean": best.get(t, 1.0),
                f"{view}_loss": 1.0, f"{view}_val_loss": 1.0,
            } | more.get("columns", {}).get(t, {})
            for t, value in values.items()
        ]  # fmt: skip
        ids = list(range(len(of_clients)))
        clients = pa.table(
            {"round": [1] * len(ids), "client": ids, f"{view}_{name}": pa.array(of_clients, pa.float64())}
        )
        config = {"algorithm": {"name": method, **more.get("settings", {})}, "dataset": {"name": "digits"}}
        return Result(
            config={**config, "seed": seed, "metric": metric},
            plan={},
            partition="p",
            rounds=rounds,
            clients=clients,
            reports=more.get("reports", pa.table({"round": pa.array([], pa.int64())})),
            timings=[],
        )

    return make


@pytest.fixture
def axes():
    """Axes in the style of `fedloom plot`."""
    from fedloom.plots import panels, style

    with style():
        yield panels(1, 1)[1][0][0]
