"""Makes the pictures of docs/plots.md: trains the runs that they show, and draws them with `fedloom plot`.

python tools/make_plot_pictures.py [FOLDER]

Runs are kept in the folder (by default build/plots). One that is there already is drawn again without training.
"""

import shlex
import subprocess
import sys
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
RUNS = {  # folder -> the command that makes it
    "digits": "compare fedavg fedrep ditto gpfl plgu-lf pfedkt --preset gpfl/digits --rounds 60",
    "features": "compare fedper fedproto gpfl --preset gpfl/digits --clients 10 --partition pathological --set k=2 "
    "--rounds 60 --seeds 1",
    "flat": "compare fedavg plgu-lf:rho=0 plgu-lf:rho=0.05 plgu-lf:rho=0.2 --preset plgu/digits --rounds 100",
    "pulls": "sweep ditto --preset gpfl/digits --grid lam=0.01,0.1,0.3,1,3 --seeds 3",
    "page": "compare page --preset page/digits --rounds 100 --seeds 1",
    "cases": "compare pfedkt:case=B pfedkt:case=D --preset pfedkt/digits --rounds 60",
    "hypernetworks": "compare pfedkt:hn=small pfedkt:hn=large --preset pfedkt/digits --rounds 60 --seeds 2",
}
FIGURES = {  # picture -> the figure and its options
    "convergence": "convergence digits",
    "distribution": "distribution digits --below 80,90,95 --method fedavg --method plgu-lf --method pfedkt",
    "clients": "clients digits",
    "tsne": "tsne features --method fedper --method gpfl --samples 300",
    "landscape": "landscape flat --method fedavg --method plgu-lf:rho=0.2",
    "sweep": "sweep pulls",
    "rewards": "rewards page",
    "cases": "convergence cases --view post --method pfedkt:case=B --method pfedkt",
    "hypernetwork": "hypernetwork hypernetworks",
}


def fedloom(command: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "fedloom", *shlex.split(command)], cwd=folder, check=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/plots").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    for name, command in RUNS.items():
        if not (folder / name).exists():
            fedloom(f"{command} --out {name}", folder)
    for name, command in FIGURES.items():
        kind = "png" if name == "tsne" else "svg"  # hundreds of points are smaller as a picture
        fedloom(f"plot {command} --out {shlex.quote(str(PICTURES / f'plots-{name}.{kind}'))}", folder)


if __name__ == "__main__":
    main()
