"""Who may use the routes for administrators: holders of the key, and without one, no page of another site.

A browser sends what any page tells it to, also to a router that listens on this machine only and so needs no key.
Such requests are known by what no page can change: `Origin`, `Sec-Fetch-Site`, and, when an attacker's own name is
made to mean 127.0.0.1 (DNS rebinding), `Host`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers

from router.http.api_keys import ApiKeys, require_admin
from shared.errors import RequestError
from shared.protocol.loopback import is_loopback

AdminGuard = Callable[[Request], Awaitable[None]]
"""Raises RequestError for whoever is no administrator. A dependency of routes, or awaited where a body decides."""

_OWN_SITE = ("same-origin", "none")
"""The page that asks is the router's own, or there is none: somebody typed the address."""


def admin_guard(keys: ApiKeys, host: str, allowed_origins: Sequence[str]) -> AdminGuard:
    """The guard of a router that listens on `host`. Pages of `allowed_origins` are let in; "*" names none."""

    async def admin_only(request: Request) -> None:
        require_admin(request)
        if keys.anybody_is_admin:  # a page of another site has no key to send
            _refuse_foreign_pages(request.headers, host, allowed_origins)

    return admin_only


def _refuse_foreign_pages(headers: Headers, listens_on: str, allowed_origins: Sequence[str]) -> None:
    asked_for, origin = headers.get("host", ""), headers.get("origin")
    if is_loopback(listens_on) and not is_loopback(_host_name(asked_for)):
        raise _foreign(f"Host is {asked_for[:100]!r}, not a name of this machine such as localhost")
    if origin is None:  # not sent with a GET for an image, a script or a link
        site = headers.get("sec-fetch-site", "none")
        if site not in _OWN_SITE:
            raise _foreign(f"Sec-Fetch-Site is {site[:100]!r}")
    elif origin not in allowed_origins and origin.partition("://")[2] != asked_for:
        raise _foreign(f"Origin is {origin[:100]!r}, which --allowed-origins does not name")


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _foreign(why: str) -> RequestError:
    return RequestError(
        f"a page of another site may not do this ({why}); with --admin-api-key, holders of the key may",
        status=403,
        code="foreign_page",
    )
