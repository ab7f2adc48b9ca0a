"""The report page in a browser: it asks for nothing, its charts are drawn, its controls work, and it can be read on a
phone, on paper, in the dark, by keyboard and by screen readers.

Without Playwright or Chromium these tests are skipped, or fail if FEDLOOM_BROWSER=required is set.
"""

import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from helpers import Crash, crash_after, make_federation, with_targets

import fedloom
from fedloom.studies.found_runs import find_runs
from fedloom.studies.live_report import LiveReport
from fedloom.studies.report import write_report
from fedloom.studies.report_data import collect

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# no GPU, and no requests of the browser's own
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
NAMES = ("</script><b>x</b>", "<img src=x onerror=alert(1)>", "a'b\"c\\", "d & e", "a very long name of a client", "f")
CLASSES = ("<b>ill</b>", "well", "</script>", "other")
SMALL = {"width": 8, "device": "cpu", "plan": "per-client"}
DRAWN = ":root:not(:has(.chart:not([data-drawn])))"  # the page with all its charts
WIDTH = "document.documentElement.scrollWidth"
METHODS = ["plgu-lf", "page:ep_max=2", "ditto", "fedrep", "fedavg"]


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    missing = [name for name in ("playwright", "axe_playwright_python") if find_spec(name) is None]
    if path is None or missing:
        why = f"there is no {' and no '.join(missing or ['Chromium'])}"
        if os.environ.get("FEDLOOM_BROWSER") == "required":
            pytest.fail(why)
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens a page in a window of its own. At the end nothing must have gone wrong in it, and a page in a file must
    have asked for nothing."""
    contexts, wrong = [], []

    def open_page(path, ready=DRAWN, **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(60_000)  # a busy machine
        tab.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        url = path if isinstance(path, str) else path.as_uri()
        tab.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith((url, "data:")) else None)
        tab.on("dialog", lambda dialog: wrong.append(dialog.message))
        tab.goto(url)
        tab.wait_for_selector(ready, state="attached")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Five methods and local training; names with everything that HTML could take for its own."""
    data = make_federation((12, 30, 7, 20, 25, 40), server=20, dtype=torch.float32)
    data = replace(data, client_names=NAMES, class_names=CLASSES)
    folder = tmp_path_factory.mktemp("page") / "comparison"
    return fedloom.compare(METHODS, data, rounds=2, seeds=2, lr=0.05, out=folder, **SMALL).folder


@pytest.fixture(scope="module")
def page(compared):
    return write_report(compared)


@pytest.fixture(scope="module")
def data(compared):
    return collect(find_runs(compared))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """The page of a single run that predicts numbers, with held-out clients and differential privacy."""
    data = with_targets(make_federation((20, 30, 25, 20, 22), held_out=9, dtype=torch.float32), "number")
    folder = tmp_path_factory.mktemp("page") / "run"
    fedloom.run("fedrep", data, rounds=3, holdout_clients=2, dp_clip=1.0, dp_noise=1.0, out=folder, **SMALL)
    return write_report(folder)


def of(data, label):
    return next(method for method in data["methods"] if method["label"] == label)


def texts(tab, selector):
    return [" ".join(text.split()) for text in tab.locator(selector).all_inner_texts()]


def blank(tab, selector="canvas"):
    """Which canvases have nothing but one colour."""
    return tab.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].filter((canvas) => {
            const drawn = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const pixels = new Uint32Array(drawn.data.buffer);
            return pixels.every((pixel) => pixel === pixels[0]);
        }).map((canvas) => canvas.closest(".chart").getAttribute("aria-label"))""",
        selector,
    )  # fmt: skip


def marks(tab, section, kind):
    """Where the marks of a chart are on the page, with their values; a chart is known by its section."""
    return tab.evaluate(
        """([section, kind]) => {
            const place = document.querySelector(`#${section} .chart`), view = drawings.get(place).view, found = [];
            const [left, top] = view.origin(), canvas = place.querySelector("canvas").getBoundingClientRect();
            const walk = (group) => { for (const mark of group.items) {
                if (mark.marktype === kind && mark.role === "mark") for (const item of mark.items) {
                    const {x1, y1, x2, y2} = item.bounds, [x, y] = [canvas.x + left + item.x, canvas.y + top + item.y];
                    found.push({datum: {...item.datum}, text: item.text, box: [x1, y1, x2, y2], x, y});
                }
                if (mark.marktype === "group") mark.items.forEach(walk);
            }};
            view.scenegraph().root.items.forEach(walk);
            return found;
        }""",
        [section, kind],
    )  # fmt: skip


# -- what is there ----------------------------------------------------------------------------------------------------


def test_everything_is_drawn_without_scrolling(visit, page, data):
    tab = visit(page)
    assert blank(tab) == []
    sections = tab.locator("main section").evaluate_all("all => all.map((section) => section.id)")
    assert sections == [
        "findings", "leaderboard", "curves", "distribution", "strip", "gains", "partition", "cost", "reports",
        "quality", "origin",
    ]  # fmt: skip
    assert tab.locator("nav a").evaluate_all("all => all.map((a) => a.hash.slice(1))") == sections
    assert texts(tab, "#findings li") == data["findings"]
    assert tab.evaluate(WIDTH) == 1200


def test_names_are_text(visit, page):
    tab = visit(page)
    assert tab.locator("b").count() == 0
    assert tab.locator("img").count() == 0
    assert texts(tab, "select[name=client] option") == list(NAMES)
    tab.select_option("select[name=client]", label=NAMES[1])
    assert texts(tab, "#story h3") == [NAMES[1]]
    assert f"{CLASSES[2]}: 36 %" in tab.locator("#story dl").inner_text()  # 12 of 33 samples


def test_a_table_can_be_sorted(visit, page, data):
    tab = visit(page)
    table = data["tables"][0]
    place = next(k for k, column in enumerate(table["columns"]) if column["key"] == "acc_low5")
    values = {row["method"]: row["cells"][place][0] for row in table["rows"]}
    rows, column = "#leaderboard tbody th", tab.locator("#leaderboard thead th", has_text="lowest 5 %")
    assert texts(tab, rows) == [row["method"] for row in table["rows"]]
    for order in ("descending", "ascending"):
        column.get_by_role("button").click()
        assert column.get_attribute("aria-sort") == order
        found = [values[method] for method in texts(tab, rows)]
        assert found == sorted(found, reverse=order == "descending")
    tab.locator("#leaderboard thead button").first.click()
    assert texts(tab, rows) == sorted(values)


def test_the_threshold_can_be_moved(visit, page, data):
    tab = visit(page)
    top = max(score for method in data["methods"] for score in method["final"]["pre"]["mean"])
    for threshold in (30, 40.5, top + 0.5):
        tab.locator("#threshold").fill(f"{round(2 * threshold) / 2:g}")
        tab.wait_for_timeout(50)
        for label, share in zip(texts(tab, "#distribution tbody th"), texts(tab, "#distribution .share"), strict=True):
            scores = of(data, label)["final"]["pre"]["mean"]
            assert share == f"{100 * sum(score < threshold for score in scores) / len(scores):.0f} %"
        (rule,) = marks(tab, "distribution", "rule")
        low, high = tab.locator("#threshold").evaluate("(slider) => [Number(slider.min), Number(slider.max)]")
        plot = tab.evaluate("drawings.get(document.querySelector('#distribution .chart')).view.width()")
        assert rule["box"][0] == pytest.approx(plot * (threshold - low) / (high - low), abs=2)


def test_sections_about_one_method_begin_with_the_best(visit, page, data):
    tab, table = visit(page), data["tables"][0]
    ranked = [row["method"] for row in table["rows"] if row["method"] != "majority"]
    assert texts(tab, "#methods label") == ["local", *METHODS]  # as they were given
    assert tab.input_value("select[name=strip-method]") == ranked[0]
    assert tab.input_value("select[name=confusion-method]") == ranked[0]
    assert tab.input_value("select[name=gain-reference]") == "local"
    assert tab.input_value("select[name=gain-method]") == next(label for label in ranked if label != "local")


def test_methods_can_be_hidden(visit, page):
    tab = visit(page)
    assert {mark["datum"]["method"] for mark in marks(tab, "cost", "symbol")} == {"local", *METHODS}
    tab.locator("#methods input[value=ditto]").uncheck()
    tab.wait_for_selector(DRAWN, state="attached")
    assert "ditto" not in {mark["datum"]["method"] for mark in marks(tab, "cost", "symbol")}
    assert "ditto" not in texts(tab, "#distribution tbody th")
    assert "ditto" in texts(tab, "#leaderboard tbody th")


def test_curves_can_be_seen_by_what_was_spent(visit, page, data):
    tab = visit(page)
    tab.select_option("select[name=curve-view]", "global")
    expected = [method for method in data["methods"] if "global" in method["curves"]]
    for x in ("rounds", "gradients", "bytes", "seconds"):
        tab.select_option("select[name=curve-x]", x)
        tab.wait_for_selector(DRAWN, state="attached")
        found = {(m["datum"]["method"], m["datum"]["round"]): m["datum"] for m in marks(tab, "curves", "symbol")}
        assert len(found) == 2 * len(expected)
        for method in expected:
            for t, spent in enumerate(method["axes"][x]):
                datum = found[method["label"], t + 1]
                assert datum["x"] == pytest.approx(spent, rel=1e-5)
                assert datum["y"] == pytest.approx(method["curves"]["global"]["mean"][t], rel=1e-5)


def test_a_click_on_a_client_shows_its_story(visit, page, data):
    tab = visit(page)
    tab.select_option("select[name=gain-method]", "fedavg")
    tab.wait_for_selector(DRAWN, state="attached")
    alone, fedavg = (of(data, label)["final"]["pre"]["mean"] for label in ("local", "fedavg"))
    gains = [b - a for a, b in zip(alone, fedavg, strict=True)]
    losing = sum(gain < 0 for gain in gains)
    assert f"{sum(gain > 0 for gain in gains)} of 6 clients gain with fedavg against local, {losing} lose" in (
        tab.locator("#gain-told").inner_text()
    )
    points = marks(tab, "gains", "symbol")
    assert len(points) == 6
    tab.locator("#gains .chart").first.scroll_into_view_if_needed()
    target = points[-1]  # drawn last, so nothing covers it
    place = next(p for p in marks(tab, "gains", "symbol") if p["datum"]["i"] == target["datum"]["i"])
    tab.mouse.click(place["x"], place["y"])
    i = place["datum"]["i"]
    assert texts(tab, "#story h3") == [NAMES[i]]
    assert tab.evaluate("document.activeElement.id") == "story"
    rows = texts(tab, "#story tbody tr")
    for label in ("local", "fedavg"):
        row = next(row for row in rows if row.startswith(f"{label} "))
        assert row.split()[1] == f"{of(data, label)['final']['pre']['mean'][i]:.1f}"
    samples = data["partition"]["samples"][i]
    assert f"{samples} (train" in tab.locator("#story dl").inner_text()


def test_the_clients_that_lose_most_can_be_opened(visit, page, data):
    tab = visit(page)
    for method in data["methods"]:
        if method["label"] == "local":
            continue
        alone = of(data, "local")["final"]["pre"]["mean"]
        gains = [b - a for a, b in zip(alone, method["final"]["pre"]["mean"], strict=True)]
        tab.select_option("select[name=gain-method]", method["label"])
        buttons = tab.locator("#gains .link")
        assert buttons.count() == min(5, sum(gain < 0 for gain in gains))
        if buttons.count():
            first = buttons.first.inner_text()
            assert gains[NAMES.index(first)] == min(gains)
            buttons.first.press("Enter")
            assert texts(tab, "#story h3") == [first]


def test_names_in_the_chart_of_costs_do_not_overlap(visit, page):
    for width in (375, 1200):
        tab = visit(page, viewport={"width": width, "height": 900})
        for x in ("gradients", "bytes", "seconds"):
            tab.select_option("select[name=cost-x]", x)
            tab.wait_for_selector(DRAWN, state="attached")
            names = [mark for mark in marks(tab, "cost", "text") if mark["text"]]
            assert {mark["text"] for mark in names} == {"local", *METHODS}
            for k, a in enumerate(names):
                for b in names[:k]:
                    (left, top, right, bottom), (x1, y1, x2, y2) = a["box"], b["box"]
                    assert right <= x1 + 2 or x2 <= left + 2 or bottom <= y1 + 2 or y2 <= top + 2, (a, b)


def test_what_methods_report(visit, page):
    tab = visit(page)
    tab.select_option("select[name=report-method]", "page:ep_max=2")
    captions = " ".join(texts(tab, "#reports figcaption"))
    for words in ("learning rate eta", "local epochs alpha", "reward of a client's agent", "weight p of a client"):
        assert words in captions
    tab.select_option("select[name=report-method]", "plgu-lf")
    assert texts(tab, "#reports figcaption") == ["layer scores xi: mean over clients"]
    tab.wait_for_selector(DRAWN, state="attached")
    assert blank(tab, "#reports canvas") == []
    layers = {(mark["datum"]["round"], mark["datum"]["entry"]) for mark in marks(tab, "reports", "rect")}
    assert layers == {(t, layer) for t in (1, 2) for layer in range(max(layers)[1] + 1)}


def test_how_it_was_made(visit, page):
    tab = visit(page)
    tab.locator("#origin summary").first.click()
    text = tab.locator("#origin details").first.inner_text()
    assert f"torch {torch.__version__}" in text
    assert "mode per-client" in text
    assert "rounds: 2" in text


# -- other runs -------------------------------------------------------------------------------------------------------


def test_a_single_run_of_numbers_with_held_out_clients_and_privacy(visit, numbers):
    tab, data = visit(numbers), collect(find_runs(numbers.parent))
    assert blank(tab) == []
    (method,) = data["methods"]
    assert f"epsilon {method['epsilon']:.3g}" in tab.locator("#cost").inner_text()
    assert "quality" not in tab.locator("main section").evaluate_all("all => all.map((section) => section.id)")
    scores = [score for score in method["final"]["pre"]["mean"] if score is not None]
    threshold = float(np.median(scores)) - 0.001  # two of three clients are worse, as lower is better
    tab.locator("#threshold").evaluate(
        "(slider, value) => { slider.step = 'any'; slider.value = value; slider.dispatchEvent(new Event('input')); }",
        threshold,
    )
    assert texts(tab, "#distribution thead th")[-1] == "above the threshold"
    assert texts(tab, "#distribution .share") == ["67 %"]
    tab.select_option("select[name=client]", "4")
    story = tab.locator("#story")
    assert "did not take part in training" in story.inner_text()
    row = texts(tab, "#story tbody tr")[0]
    for view in ("new", "joined"):
        assert f"{method['final'][view]['mean'][4]:.4g}" in row
    tab.select_option("select[name=spread-view]", "joined")
    assert tab.locator("#distribution .share").count() == 1


def test_an_unfinished_run_says_so(visit, tmp_path):
    settings = {"rounds": 3, "checkpoint_every": 1, **SMALL}
    with pytest.raises(Crash):
        fedloom.run(
            "ditto", make_federation((20, 30), dtype=torch.float32), out=tmp_path, on_round=crash_after(2), **settings
        )
    tab = visit(write_report(tmp_path))
    assert texts(tab, "#progress") == ["Not all is done: 1 run not finished."]
    assert blank(tab) == []


@contextmanager
def serving(folder):
    with LiveReport(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


def test_a_live_page_keeps_up_and_leaves_the_reader_where_he_is(visit, tmp_path):
    federation = make_federation((20, 30), dtype=torch.float32)
    settings = {"rounds": 4, "checkpoint_every": 1, "out": tmp_path, **SMALL}
    with pytest.raises(Crash):
        fedloom.run("ditto", federation, on_round=crash_after(2), **settings)
    with serving(tmp_path) as address:
        tab = visit(address)
        assert "1 run not finished" in tab.locator("#progress").inner_text()
        tab.locator("#origin summary").click()
        tab.select_option("select[name=curve-x]", "bytes")
        tab.locator("select[name=curve-x]").focus()
        fedloom.run("ditto", federation, resume=True, **settings)
        tab.wait_for_function("document.getElementById('progress').textContent === ''")
        tab.wait_for_selector(DRAWN, state="attached")
        assert blank(tab) == []
        assert {mark["datum"]["round"] for mark in marks(tab, "curves", "symbol")} == {1, 2, 3, 4}
        assert tab.locator("select[name=curve-x]").input_value() == "bytes"
        assert tab.evaluate("document.activeElement.name") == "curve-x"
        assert tab.locator("#origin details").evaluate("(details) => details.open")


# -- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["page", "numbers"])
def test_a_phone_needs_no_scrolling_to_the_side(visit, which, request):
    tab = visit(request.getfixturevalue(which), viewport={"width": 375, "height": 700}, has_touch=True, is_mobile=True)
    assert tab.evaluate(WIDTH) <= 375
    for section in tab.locator("main section").all():
        section.scroll_into_view_if_needed()
        assert tab.evaluate(WIDTH) <= 375
    wide = tab.locator(".chart canvas").evaluate_all(
        "all => all.map((c) => c.getBoundingClientRect()).filter((box) => box.left < 0 || box.right > 375).length"
    )
    assert wide == 0
    assert blank(tab) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["page", "numbers"])
def test_accessibility(visit, which, scheme, request):
    from axe_playwright_python.sync_playwright import Axe

    tab = visit(request.getfixturevalue(which), color_scheme=scheme)
    assert tab.evaluate("document.documentElement.dataset.theme") == scheme
    tab.locator("summary").first.click()
    faults = Axe().run(tab).response["violations"]
    assert [
        (fault["id"], node["html"])
        for fault in faults
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ] == []


def test_charts_follow_the_theme(visit, page):
    tab = visit(page, color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(colour) == "rgb(20, 23, 28)"
    dark = marks(tab, "cost", "symbol")
    tab.get_by_role("button", name="Light", exact=True).click()
    tab.wait_for_selector(DRAWN, state="attached")
    assert tab.evaluate(colour) == "rgb(255, 255, 255)"
    assert blank(tab) == []
    assert [mark["datum"]["method"] for mark in marks(tab, "cost", "symbol")] == [m["datum"]["method"] for m in dark]


def test_the_keyboard_is_enough(visit, page):
    tab = visit(page)
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "content"
    reached = set()
    for _ in range(300):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.name ?? ''"))
        if tab.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    controls = tab.locator("main :is(button, select, input)").evaluate_all("all => all.map((e) => e.name)")
    assert set(controls) <= reached
    sort = tab.locator("#leaderboard thead button", has_text="worst")
    sort.focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#leaderboard th[aria-sort=descending]").inner_text().startswith("worst")
    assert tab.evaluate("document.activeElement.textContent") == "worst"  # the focus stays
    tab.locator("#threshold").focus()
    before = tab.locator("#distribution output").inner_text()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#distribution output").inner_text() != before


def test_paper(visit, page, tmp_path):
    tab = visit(page, color_scheme="dark")
    tab.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"  # as before
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.wait_for_selector(DRAWN, state="attached")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert blank(tab) == []
    for selector in ("nav", "#theme", ".skip"):
        assert not tab.locator(selector).is_visible()
    assert tab.locator("#methods").is_visible()  # the key to the colours
