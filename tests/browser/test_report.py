"""The HTML report of a plan in a real browser, from a file, as a user opens it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from playwright.async_api import Browser, ViewportSize

from planner.answer import Answer
from planner.report.html import write_html
from tests.browser.conftest import Run
from tests.patience import PATIENCE_S
from tests.unit.planner.answers import comparison_answer, plan_answer

LONG = "a-directory-with-a-long-name/" * 4 + "trace.jsonl"
NARROW = ViewportSize(width=400, height=800)
WIDE = ViewportSize(width=1400, height=900)

STICKS_OUT = """() => [...document.querySelectorAll("body *")]
    .filter((one) => !one.closest(".scroll") && !one.closest("title, desc"))
    .filter((one) => one.getClientRects().length)
    .filter((one) => { const box = one.getBoundingClientRect();
                       return box.left < 0 || box.right > document.documentElement.clientWidth + 0.5; })
    .map((one) => one.outerHTML.slice(0, 200))"""


def plan() -> Answer:
    return plan_answer(max_nodes=8, price=2.5, source=LONG)


def comparison() -> Answer:
    """With a remark that has no place to break."""
    return replace(comparison_answer(), remarks=("x" * 300,))


@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("make", [plan, comparison])
def test_it_fits_and_asks_for_nothing(
    run: Run, browser: Browser, tmp_path: Path, make: Callable[[], Answer], size: ViewportSize
) -> None:
    async def scenario() -> None:
        answer, path = make(), tmp_path / "plan.html"
        write_html(answer, path)
        context = await browser.new_context(viewport=size)
        try:
            page = await context.new_page()
            page.set_default_timeout(1000 * PATIENCE_S)
            urls: list[str] = []
            complaints: list[str] = []
            page.on("request", lambda request: urls.append(request.url))
            page.on("console", lambda said: complaints.append(said.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            await page.goto(path.as_uri())
            assert await page.locator("#verdict").inner_text() == answer.verdict.headline
            await page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
            assert await page.evaluate(STICKS_OUT) == []
            root = "document.documentElement"
            assert await page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
            # The policy lets the style sheet in.
            panel = await page.evaluate("getComputedStyle(document.querySelector('.panel')).borderRadius")
            assert panel == "8px"
            assert urls == [path.as_uri()]
            assert complaints == []
        finally:
            await context.close()

    run(scenario())


def test_its_policy_forbids_what_would_be_loaded(run: Run, browser: Browser, tmp_path: Path) -> None:
    """A script that came into the file by whatever way does not run."""

    async def scenario() -> None:
        path = tmp_path / "plan.html"
        write_html(plan_answer(), path)
        planted = "<script>document.title = 'planted'</script><img src='http://127.0.0.1:9/x.png'>"
        path.write_text(path.read_text().replace("<main>", planted + "<main>"))
        page = await browser.new_page()
        try:
            failed: list[str] = []
            page.on("requestfailed", lambda request: failed.append(f"{request.url} {request.failure}"))
            await page.goto(path.as_uri())
            assert await page.title() == "Plan for trace.jsonl · Baton"
            assert failed == ["http://127.0.0.1:9/x.png csp"]
        finally:
            await page.close()

    run(scenario())
