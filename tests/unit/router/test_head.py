"""HEAD is answered wherever GET is: with the status and the headers of GET, without a body."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from router.config import HttpOptions
from router.http.page_api import PAGE_PATHS
from tests.unit.router.fakes import joined_pair
from tests.unit.router.raw_client import raw_client

pytestmark = pytest.mark.uvloop

ORIGIN = {"Origin": "https://a.example"}
ENDLESS = "/live"
ODD_PATHS = ("/openapi.json", "/v1/models/none", "/v1/models/tiny", "/nowhere")
VARIES = ("date", "x-request-id", "content-length", "transfer-encoding")
"""The length may differ from one GET to the next, as a body may tell a time. uvicorn leaves the encoding out."""


def told(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in VARIES}


async def test_head_is_get_without_a_body(model_folder: Path) -> None:
    http = HttpOptions(port=0, served_model_name="tiny", allowed_origins=(ORIGIN["Origin"],))
    async with joined_pair(model_folder, http=http) as (_, _, client):
        document = (await client.get("/openapi.json")).json()
        paths = [path for path, methods in document["paths"].items() if "get" in methods and "{" not in path]
        assert ENDLESS in paths and len(paths) > 8
        for path in (*paths, *ODD_PATHS, *PAGE_PATHS):
            async with client.stream("GET", path, headers=ORIGIN) as get:
                pass
            head = await client.head(path, headers=ORIGIN)
            assert (head.status_code, told(head)) == (get.status_code, told(get)), path
            assert head.content == b"" and head.headers["x-request-id"], path
        page, of_page = await client.get("/"), await client.head("/")
        assert of_page.headers["content-length"] == str(len(page.content)) == page.headers["content-length"]
        for path in ("/generate", "/v1/completions"):
            head = await client.head(path)
            assert (head.status_code, head.headers["allow"]) == (405, "POST")


async def test_head_ends_where_get_is_endless_and_the_connection_goes_on(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, router, _), raw_client(router.http_port) as client:
        for path in (ENDLESS, "/health", ENDLESS):
            client.send(f"HEAD {path} HTTP/1.1\nHost: a\n\n")
            head = await client.read_until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        client.send("GET /health HTTP/1.1\nHost: a\n\n")
        assert (await client.answer()).status == 200
