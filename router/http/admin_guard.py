"""Guards the admin routes: a caller needs the key; where none is set, pages of other sites are refused.

A browser sends the requests of any page, also to a router on this machine that needs no key. Pages cannot change the
headers `Origin`, `Sec-Fetch-Site` and `Host`, by which such requests are recognized; `Host` is for DNS rebinding,
where an attacker's name resolves to 127.0.0.1.
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
"""Raises RequestError for a caller that may not use admin routes. It is a dependency of routes, or awaited in one."""

_OWN_SITE = ("same-origin", "none")
"""The values of Sec-Fetch-Site for the router's own page, and for an address that was typed."""


def admin_guard(keys: ApiKeys, host: str, allowed_origins: Sequence[str]) -> AdminGuard:
    """The guard of a router that listens on `host`. Pages of `allowed_origins` may call; "*" allows none."""

    async def admin_only(request: Request) -> None:
        require_admin(request)
        if keys.admins_need_no_key:  # a page of another site has no key to send
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
