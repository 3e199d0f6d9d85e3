"""`/`: the page. Its files are part of the package, and it loads nothing from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_FOLDER = Path(__file__).parents[1] / "page"
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in os.listdir(_FOLDER) if name != "index.html")})
"""The files that a browser loads before a key can be typed into the page."""

_HEADERS = {
    "Cache-Control": "no-cache",  # a browser asks each time, and gets 304 while the file is the same
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file with the headers that guard the page."""
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


def serve_page(app: FastAPI) -> None:
    """Add the routes of the page."""
    files = _PageFiles(directory=_FOLDER)
    app.mount("/page", files)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)
