"""`/`: the page. Its files are part of the package, and it loads nothing from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

_FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
PAGE_PATHS = frozenset(_FILES)
"""The files that a browser loads before a key can be typed into the page."""

_HEADERS = {
    "Cache-Control": "no-cache",  # a browser asks each time, and gets 304 while the file is the same
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class _File:
    body: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> _File:
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        return cls(body, {**_HEADERS, "Content-Type": _TYPES[path.suffix], "ETag": etag})

    def respond(self, if_none_match: str) -> Response:
        known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        if self.headers["ETag"] in known:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


def page_routes() -> APIRouter:
    """A route for each file."""
    router = APIRouter(include_in_schema=False)

    def add(url: str, file: _File) -> None:
        async def serve(request: Request) -> Response:
            return file.respond(request.headers.get("if-none-match", ""))

        router.add_api_route(url, serve, methods=["GET"], response_model=None)

    for url, path in _FILES.items():
        add(url, _File.read(path))
    return router
