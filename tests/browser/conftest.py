"""One headless Chromium for all tests of the page; a context, a router and scripted nodes for each.

Debian's Chromium, not Playwright's download: `apt-get install chromium`. Without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, ViewportSize, async_playwright

from router.config import HttpOptions
from router.server import Router
from tests.patience import PATIENCE_S
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.fakes import joined_router, write_model

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP = ViewportSize(width=1280, height=900)
PHONE = ViewportSize(width=360, height=740)


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    """The browser's connection lives on one loop, so all tests of the page run on it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def browser(loop: asyncio.Runner) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("NO CHROMIUM HERE: the page is not tested in a browser (apt-get install chromium)")

    async def launch() -> tuple[Any, Browser]:
        playwright = await async_playwright().start()
        return playwright, await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

    async def close() -> None:
        await browser.close()
        await playwright.stop()

    playwright, browser = loop.run(launch())
    try:
        yield browser
    finally:
        loop.run(close())


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@dataclass
class Site:
    """An open page, the router behind it, and what the browser has asked for and complained about."""

    page: Page
    router: Router
    urls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    async def text(self, selector: str) -> str:
        return await self.page.locator(selector).inner_text()

    async def shows(self, selector: str, words: str) -> None:
        """Until an element's text contains `words`."""
        await self.page.locator(selector).filter(has_text=words).first.wait_for()

    async def overflows(self) -> bool:
        """True when the page can be scrolled sideways."""
        root = "document.documentElement"
        return bool(await self.page.evaluate(f"{root}.scrollWidth > {root}.clientWidth"))


@contextlib.asynccontextmanager
async def opened(
    browser: Browser,
    folder: Path,
    nodes: list[FakeNode],
    *,
    http: HttpOptions | None = None,
    size: ViewportSize = DESKTOP,
    before: str = "",
    **context_options: Any,
) -> AsyncIterator[Site]:
    """The page of a router with these nodes; the script `before` runs first. At the end nobody else was asked."""
    async with joined_router(folder, nodes, http=http, wait=http is None) as (router, _):
        context = await browser.new_context(viewport=size, **context_options)
        try:
            await context.add_init_script(before)
            page = await context.new_page()
            page.set_default_timeout(1000 * PATIENCE_S)
            site = Site(page, router)
            page.on("request", lambda request: site.urls.append(request.url))
            page.on("pageerror", lambda error: site.complaints.append(str(error)))
            page.on("console", lambda said: _note(site, said))
            await page.goto(router.url + "/")
            yield site
            assert [url for url in site.urls if not url.startswith(router.url)] == []
        finally:
            await context.close()


def _note(site: Site, said: Any) -> None:
    if said.type in ("error", "warning"):
        site.complaints.append(said.text)
