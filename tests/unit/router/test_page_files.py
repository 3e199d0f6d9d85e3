"""The page's files over HTTP. What it does in a browser is tested in tests/browser."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from router.config import HttpOptions
from router.http.page_api import PAGE_PATHS
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.fakes import Role, joined_router

ROOT = Path(__file__).resolve().parents[3]
JAVASCRIPT = ("text/javascript", "application/javascript")
TYPES = {"/": "text/html", ".css": "text/css", ".js": JAVASCRIPT, ".svg": "image/svg+xml"}


def test_every_file_of_the_folder_is_served_and_packaged() -> None:
    names = {path.name for path in (ROOT / "router" / "page").iterdir()}
    assert {"/" if name == "index.html" else f"/page/{name}" for name in names} == PAGE_PATHS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "page/*" in project["tool"]["setuptools"]["package-data"]["router"]


async def test_files_come_typed_guarded_and_cheaply_again(model_folder: Path) -> None:
    http = HttpOptions(port=0, api_keys=("secret",))  # the page itself needs no key
    async with (
        FakeNode(Role.DECODE) as node,
        joined_router(model_folder, [node], http=http, wait=False) as (_, client),
    ):
        for path in sorted(PAGE_PATHS):
            response = await client.get(path)
            suffix = "/" if path == "/" else Path(path).suffix
            assert response.status_code == 200 and response.content, path
            assert response.headers["content-type"].startswith(TYPES[suffix])
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'self'" in response.headers["content-security-policy"]
            again = await client.get(path, headers={"If-None-Match": f'"x", W/{response.headers["etag"]}'})
            assert (again.status_code, again.content) == (304, b"")
            changed = await client.get(path, headers={"If-None-Match": '"another"'})
            assert changed.content == response.content
            head = await client.head(path)
            assert head.headers["content-length"] == str(len(response.content)) and not head.content
        assert (await client.get("/page/../app.py", headers=KEY)).status_code == 404


KEY = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("path", sorted((ROOT / "router" / "page").iterdir()), ids=lambda path: path.name)
def test_nothing_is_loaded_from_elsewhere_or_turned_into_markup(path: Path) -> None:
    text = path.read_text()
    others = [url for url in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in url]
    assert others == []
    if path.suffix == ".js":
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", text), "the CSP would block it"
