"""Makes the pictures of docs/report.md: carries out a comparison, writes its report and photographs it.

    python tools/make_report_pictures.py [--runs FOLDER] [--out docs/pictures]

Needs Playwright and Chromium. With `--runs`, the report of a folder with runs is photographed instead.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

COMMAND = "compare local fedavg fedrep ditto page --clients 20 --rounds 20 --seeds 3"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# no GPU, and no requests of the browser's own
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
DRAWN = ":root:not(:has(.chart:not([data-drawn])))"
LARGEST = 150_000  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures", metavar="FOLDER")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder, page = options.runs, Path(temporary) / "report.html"
        if folder is None:
            folder = Path(temporary) / "runs"
            fedloom(*COMMAND.split(), "--out", str(folder))
        fedloom("report", str(folder), "--out", str(page))
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
            photograph(browser, page, options.out)
            browser.close()


def fedloom(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "fedloom", *arguments], check=True)


def photograph(browser: Browser, page: Path, out: Path) -> None:
    light = opened(browser, page)
    save(light.screenshot(), out / "report-light.png")
    light.select_option("select[name=gain-method]", "fedavg")
    save(of(light, "gains", 1250), out / "report-clients.png")
    save(of(light, "reports", 800), out / "report-page.png")
    dark = opened(browser, page, color_scheme="dark")
    save(of(dark, "distribution", 900), out / "report-dark.png")
    phone = opened(browser, page, viewport={"width": 375, "height": 812})
    save(phone.screenshot(), out / "report-phone.png")
    paper = opened(browser, page, viewport={"width": 794, "height": 1123})  # of A4 at 96 dots per inch
    paper.emulate_media(media="print")
    paper.add_style_tag(content="body { padding: 1.2cm }")  # the margins
    paper.evaluate("dispatchEvent(new Event('beforeprint'))")
    paper.wait_for_selector(DRAWN, state="attached")
    save(paper.screenshot(), out / "report-print.png")


def opened(browser: Browser, page: Path, **options: Any) -> Page:
    """The page in a window of its own, with all its charts."""
    tab = browser.new_page(**{"viewport": {"width": 1200, "height": 1000}, **options})
    tab.goto(page.as_uri())
    tab.wait_for_selector(DRAWN, state="attached")
    return tab


def of(tab: Page, section: str, height: int) -> bytes:
    """A picture that begins with a section."""
    tab.wait_for_selector(DRAWN, state="attached")
    tab.evaluate("document.getElementById('methods').style.position = 'static'")
    tab.set_viewport_size({"width": 1200, "height": height})
    tab.evaluate("(id) => scrollTo(0, document.getElementById(id).getBoundingClientRect().top + scrollY)", section)
    tab.wait_for_selector(DRAWN, state="attached")
    return tab.screenshot()


def save(picture: bytes, path: Path) -> None:
    """Write a PNG with the 256 most frequent colours, which is small."""
    image, palette = Image.open(io.BytesIO(picture)).convert("RGB"), Image.new("P", (1, 1))
    frequent = sorted(image.getcolors(1 << 24), reverse=True)[:256]
    palette.putpalette([part for _, colour in frequent for part in colour])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path} {size / 1000:.0f} kB")
    assert size < LARGEST, path


if __name__ == "__main__":
    main()
