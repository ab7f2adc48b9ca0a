"""How long it takes to make the report page of large runs and to open it in a browser, and how large the file is.

    python benchmarks/report.py
    python benchmarks/report.py --clients 1000 --methods local fedavg --rounds 50

A comparison is carried out for two rounds. Then the records of these two rounds are repeated, with small random
differences, until there are as many rounds as asked for. So all files are those that FedLoom writes, and as large as
those of a long comparison, but the scores mean nothing.

Making is what `fedloom report` does, in this process. Opening is the time until Chromium's load event, until the first
chart is drawn, and until all are. It needs Playwright and Chromium; without them these columns are empty.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from machine import describe, head, row

import fedloom
from fedloom.config.files import read_config, to_yaml
from fedloom.runs.records import FILES
from fedloom.storage.files import read_table, table_writer, text_writer
from fedloom.storage.manifest import Manifest
from fedloom.studies.report import write_report
from fedloom.studies.result import best_on_validation

METHODS = ("local", "fedavg", "fedprox", "fedrep", "fedper", "fedbabu", "ditto", "lg-fedavg", "plgu-lf", "page")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# no GPU, and no requests of the browser's own
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the page")
    parser.add_argument("--quick", action="store_true", help="only try it out")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.methods, options.rounds, options.seeds, options.repeats = 6, METHODS[:2], 6, 1, 1
    print(describe(torch.device("cpu")))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "comparison"
        settings = {"clients": options.clients, "rounds": 2, "seeds": options.seeds, "device": "cpu"}
        data = {"dataset": "synthetic", "per_client": 40, "model": "mlp", "width": 16}
        fedloom.compare(options.methods, out=folder, **data, **settings)
        for run in sorted(folder.glob("runs/*/*")):
            lengthen(run, options.rounds)
        made, page = [], folder
        for _ in range(options.repeats):
            start = time.perf_counter()
            page = write_report(folder)
            made.append(time.perf_counter() - start)
        opened = open_page(page, options.repeats)
        if options.out is not None:
            shutil.copy(page, options.out)
        head("clients", "methods", "rounds", "seeds", "made", "size", "load event", "first chart", "all charts")
        row(
            options.clients, len(options.methods), options.rounds, options.seeds, f"{np.median(made):.2f} s",
            f"{page.stat().st_size / 1e6:.2f} MB", *(f"{value:.2f} s" if value else "" for value in opened),
        )  # fmt: skip


def lengthen(folder: Path, rounds: int) -> None:
    """Give a run of two rounds more of them."""
    manifest, draw = Manifest(folder), np.random.default_rng(0)
    manifest.load()
    files, long = {}, {}
    for name in FILES:
        table = read_table(folder / name)
        repeated = []
        for k in range(rounds // 2):
            columns = {"round": pa.array(table["round"].to_numpy() + 2 * k)}
            for column in table.column_names[1:]:
                values = table[column]
                if pa.types.is_floating(values.type):
                    drawn = values.to_numpy() * (1 - 0.02 * draw.random(len(table)))
                    values = pa.array(drawn, values.type, mask=values.is_null().to_numpy())
                columns[column] = values
            repeated.append(pa.table(columns))
        long[name] = pa.concat_tables(repeated).combine_chunks()
        files[name] = table_writer(long[name])
    metrics = read_table(folder / "metrics.parquet")  # of the last round, which is now that of the best one
    baseline, kept = (metrics.filter(pc.field("round") == t) for t in (0, 2))
    best = pa.array([best_on_validation(long["rounds.parquet"].to_pylist(), "pre")["round"]] * len(kept))
    kept = kept.set_column(kept.column_names.index("round"), "round", best)
    files["metrics.parquet"] = table_writer(pa.concat_tables([baseline, kept]).combine_chunks())
    config = read_config(folder / "config.yaml") | {"rounds": 2 * (rounds // 2)}
    manifest.write({**files, "config.yaml": text_writer(to_yaml(config))})


def open_page(page: Path, repeats: int) -> list[float]:
    """Seconds until the load event, the first chart and all charts; nothing without a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return [0.0] * 3
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        return [0.0] * 3
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        for _ in range(repeats):
            tab = browser.new_page(viewport={"width": 1200, "height": 900})
            start = time.perf_counter()
            tab.goto(page.as_uri())
            seconds = [time.perf_counter() - start]
            for condition in (".chart[data-drawn]", ":root:not(:has(.chart:not([data-drawn])))"):
                tab.wait_for_selector(condition, state="attached")
                seconds.append(time.perf_counter() - start)
            found.append(seconds)
            tab.close()
        browser.close()
    return np.median(found, axis=0).tolist()


if __name__ == "__main__":
    main()
