"""Makes the pictures of docs/gallery.md by the commands that are written there, in a temporary folder.

python tools/make_gallery.py    # takes a few minutes, and needs playwright and Chromium for the picture of a page
"""

import argparse
import io
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "gallery.md"
PICTURES = DOCS / "pictures"
OTHERS = {  # pictures that no command makes under their own name -> the file they are made of
    "gallery-report.png": "report.html",
    "gallery-audit.png": "audit/recoveries.png",
}
LARGEST = 150_000  # bytes of a picture
BROWSER = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def commands(text: str) -> list[list[str]]:
    """The commands in the blocks of a page."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def pictures(text: str) -> list[str]:
    """The names of the pictures of a page."""
    return re.findall(r"\(pictures/([\w.-]+)\)", text)


def photograph(page: Path, out: Path) -> None:
    """Write the top of a page in a browser as a picture of few colours."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=BROWSER)
        view = browser.new_page(viewport={"width": 1250, "height": 1330})
        view.goto(page.as_uri())
        view.wait_for_selector("svg, canvas")
        view.wait_for_timeout(500)  # the charts that are in view
        image = Image.open(io.BytesIO(view.screenshot())).convert("RGB")
        browser.close()
    image.quantize(128, dither=Image.Dither.NONE).save(out, optimize=True)


def make(folder: Path) -> None:
    """Carry out the commands in a folder, and copy each picture of the page when it is there."""
    text = PAGE.read_text(encoding="utf-8")
    missing = set(pictures(text))
    PICTURES.mkdir(exist_ok=True)
    for words in commands(text):
        print("$", shlex.join(words), flush=True)
        program = [sys.executable, "-m", "fedloom"] if words[0] == "fedloom" else words[:1]
        subprocess.run([*program, *words[1:]], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for name in sorted(missing):
            if (made := folder / OTHERS.get(name, name)).is_file():
                copy(made, PICTURES / name)
                missing.remove(name)
    if missing:
        sys.exit(f"No command makes {', '.join(sorted(missing))}.")


def copy(made: Path, picture: Path) -> None:
    """Copy a picture, or photograph a page."""
    if made.suffix == ".html":
        photograph(made, picture)
    else:
        shutil.copy(made, picture)
    if (size := picture.stat().st_size) > LARGEST:
        sys.exit(f"{picture.name} has {size:,} bytes; draw less.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the commands are carried out [a temporary folder]")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        make(folder or Path(temporary))


if __name__ == "__main__":
    main()
