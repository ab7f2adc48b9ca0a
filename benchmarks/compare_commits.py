"""Check that two commits compute the same results, to the last bit, on this machine.

    python benchmarks/compare_commits.py OLD_COMMIT [NEW_COMMIT]

Runs the same commands with the source of both commits (the new one defaults to the working tree): methods on both
engines, a comparison with two seeds, a sweep, and a run that the old commit starts and both continue. Prints one line
per file that differs and exits with 1 if there is any. Plans that depend on timing are avoided, so every file of a run
directory must be equal but those that record time and hardware.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

METHODS = [
    "plgu-lf", "plgu-grep", "plgu-ghn", "gpfl", "page", "pfedkt",  # the six systems
    "fedavg", "ditto", "scaffold", "fedala", "fedfomo", "pfedhn", "fedrecon", "moon",
]  # fmt: skip
ENGINES = {
    "reference": ["--engine", "reference"],
    "stacked": ["--plan", "stacked"],
    "eager": ["--plan", "stacked-eager"],
}
SMALL = ["--clients", "6", "--rounds", "3", "--device", "cpu", "--set", "server_share=0.1"]
MORE = {
    "batchnorm": ["run", "fedper", "--model", "resnet18_bn", "--plan", "stacked", "--clients", "3", "--rounds", "1",
                  "--set", "subset=2", "--device", "cpu"],
    "unseen": ["run", "pfedhn", "--plan", "stacked", "--holdout-clients", "2", "--set", "join_rounds=2", *SMALL],
    "partial": ["run", "fedrep", "--plan", "stacked", "--participation", "0.5", "--eval-clients", "4", *SMALL],
    "disk": ["run", "ditto", "--plan", "stacked", "--store", "disk", "--participation", "0.5", *SMALL],
    "compare": ["compare", "fedavg", "ditto", "gpfl", "--seeds", "2", "--plan", "stacked", *SMALL],
    "sweep": ["sweep", "ditto", "--grid", "lr=0.01,0.1", "--grid", "lam=0.1,1", "--plan", "stacked", *SMALL],
}  # fmt: skip
TIMED = {"manifest.json", "plan.json", "environment.json", "timings.parquet", "run.log", ".lock"}
STOP = """
import sys, fedloom
def stop(done, total, row):
    if done == 2: raise KeyboardInterrupt
try:
    fedloom.run(sys.argv[1], rounds=4, clients=6, plan="stacked", device="cpu", checkpoint_every=1, out=sys.argv[2],
                on_round=stop)
except KeyboardInterrupt:
    pass
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--only", help="carry out the jobs whose names contain this")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [_source(folder / f"source-{place}", c) for place, c in enumerate((asked.old, asked.new))]
        jobs = {f"{m}-{e}": ["run", m, *options, *SMALL] for m in METHODS for e, options in ENGINES.items()} | MORE
        jobs = {job: words for job, words in jobs.items() if asked.only is None or asked.only in job}
        different = []
        for job, words in jobs.items():
            outputs = [folder / f"{job}-{place}" for place in range(2)]
            for source, out in zip(sources, outputs, strict=True):
                _run(source, ["-m", "fedloom", *words, "--out", str(out)])
            different += _compare(job, *outputs)
        for method in ("ditto", "gpfl") if asked.only is None or asked.only in "resume" else ():
            different += _resume(method, sources, folder)
    print(f"{len(jobs)} jobs, {len(different)} differences")
    return 1 if different else 0


def _source(folder: Path, commit: str | None) -> Path:
    """A folder with the packages of a commit, or of the working tree."""
    root = Path(__file__).parents[1]
    if commit is None:
        return root / "src"
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder / "src"


def _run(source: Path, words: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed with the source in {source}:\n{done.stderr[-3000:]}")


def _resume(method: str, sources: list[Path], folder: Path) -> list[str]:
    """Both commits continue a run that the old one started."""
    outputs = [folder / f"resume-{method}-{place}" for place in range(2)]
    _run(sources[0], ["-c", STOP, method, str(outputs[0])])
    shutil.copytree(outputs[0], outputs[1])
    for source, out in zip(sources, outputs, strict=True):
        _run(source, ["-m", "fedloom", "run", "--resume", str(out)])
    return _compare(f"resume-{method}", *outputs)


def _compare(job: str, old: Path, new: Path) -> list[str]:
    """Names of files whose contents differ."""
    names = [{f.relative_to(out) for f in out.rglob("*") if f.is_file()} for out in (old, new)]
    found = []
    for name in sorted(names[0] | names[1]):
        if name.name in TIMED or _contents(old / name) == _contents(new / name):
            continue
        print(f"{job}: {name} differs", flush=True)
        found.append(f"{job}/{name}")
    print(f"{job}: {len(names[0])} files compared", flush=True)
    return found


def _contents(file: Path) -> object:
    if not file.exists():
        return None
    if file.suffix == ".parquet":
        table = pq.read_table(file)
        return table.schema.metadata, str(table.to_pydict())
    if file.parent.name == "final" or file.suffix == ".npy":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    if file.name.startswith(("leaderboard", "sweep.")) and file.suffix in (".csv", ".md", ".tex"):
        return _without_seconds(file)
    if file.name == "summary.json":
        return json.loads(file.read_text())
    return file.read_bytes()


def _without_seconds(file: Path) -> list[list[str]]:
    """The cells of a table but for those of the last columns, which are seconds."""
    separator = {".csv": ",", ".md": "|", ".tex": "&"}[file.suffix]
    rows = [line.split(separator) for line in file.read_text().splitlines()]
    timed = {place for row in rows for place, cell in enumerate(row) if "seconds" in cell or "s/round" in cell}
    return [[cell for place, cell in enumerate(row) if place not in timed] for row in rows]


if __name__ == "__main__":
    sys.exit(main())
