"""API keys of clients and administrators, which are sent as `Authorization: Bearer KEY`, or as `x-api-key: KEY`.

    keys that are set       client routes         admin routes (flush, abort all, profiles)
    none                    open                  open
    --api-key               that key              that key
    --admin-api-key         open                  that key
    both                    either key            --admin-api-key

This is SGLang's `admin_api_key`, except that an admin key opens client routes as well. Admin routes are never open to
pages of other sites (`admin_guard`), and routes that change the fleet need more (`fleet_api.fleet_guards`). Keys are
kept as digests only, so that no log, traceback or answer can have one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import HttpOptions
from router.http.page_api import PAGE_PATHS
from router.http.responses import refuse
from shared.errors import ConfigError, RequestError
from shared.log import warn
from shared.protocol.loopback import is_loopback

OPEN_PATHS = frozenset({"/health"}) | PAGE_PATHS
"""Paths that need no key: the probes', and the page, which asks for a key."""

_ACCESS = "access"
_CACHE_OWNER = "cache_owner"


class Access(IntEnum):
    """The rights of a caller; each includes those before it."""

    NOTHING = 0
    CLIENT = 1
    ADMIN = 2


def key_digests(flag: str, given: Sequence[str] = (), file: Path | None = None) -> tuple[bytes, ...]:
    """The digests of keys from `flag` and the environment (`given`), and from `file`, one a line, # for comments.

    Raises ConfigError for a file that cannot be read or has no key, and for a key that no header can have.
    """
    keys = list(given)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{flag}-file {file} cannot be read: {e}") from e
        keys += [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"{flag}-file {file} has no key in it")
    for key in keys:
        if not key or not key.isprintable() or any(c.isspace() for c in key):
            raise ConfigError(
                f"{flag}: a key is empty, or has spaces in it, so it cannot be sent in a header"
            )
    return tuple(_digest(key.encode()) for key in keys)


class ApiKeys:
    """The keys in force, as digests. With `share_cache`, cached prefixes of one key serve requests of all."""

    def __init__(
        self, clients: Sequence[bytes], admins: Sequence[bytes], *, share_cache: bool = False
    ) -> None:
        self._share_cache = share_cache
        self._clients, self._admins = clients, admins

    @property
    def has_clients(self) -> bool:
        """True when clients need a key."""
        return bool(self._clients)

    @property
    def has_admins(self) -> bool:
        """True when administrators need a key of their own."""
        return bool(self._admins)

    def cache_owner(self, authorization: bytes) -> bytes:
        """The digest of the sender's key; empty for a sender without a key, and where all share one cache."""
        digest = _digest_of(authorization)
        known = not self._share_cache and _is_one_of(digest, (*self._clients, *self._admins))
        return digest if known else b""

    def access(self, authorization: bytes) -> Access:
        """What the sender of this header may do. Compares with every key, in the same time for any of them."""
        digest = _digest_of(authorization)
        is_admin, is_client = _is_one_of(digest, self._admins), _is_one_of(digest, self._clients)
        if is_admin or (not self._admins and (is_client or not self._clients)):
            return Access.ADMIN
        return Access.CLIENT if is_client or not self._clients else Access.NOTHING


def cache_owner_of(scope: Scope) -> bytes:
    """`ApiKeys.cache_owner` of the caller, behind an ApiKeyCheck."""
    owner: bytes = scope["state"][_CACHE_OWNER]
    return owner


def api_keys(http: HttpOptions) -> ApiKeys:
    """The keys that clients and administrators may use. Raises ConfigError."""
    return ApiKeys(
        key_digests("--api-key", http.api_keys, http.api_key_file),
        key_digests("--admin-api-key", http.admin_api_keys, http.admin_api_key_file),
        share_cache=http.share_cache_across_api_keys,
    )


def warn_if_open(keys: ApiKeys, host: str) -> None:
    """Log a warning when other machines can reach `host`, and need no key for it."""
    if not keys.has_clients and not is_loopback(host):
        warn(
            "clients_need_no_key",
            host=host,
            reason="every client that reaches --host can use it: see --api-key",
        )


class ApiKeyCheck:
    """Middleware: answers 401 to a caller without rights, and keeps the rights of others in the scope."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        given = _given(scope["headers"])
        access = self._keys.access(given)
        if access is Access.NOTHING and scope["path"] not in OPEN_PATHS:
            await refuse(_refusal("the API key is missing or wrong"), scope, receive, send)
            return
        owner = self._keys.cache_owner(given)
        scope.setdefault("state", {}).update({_ACCESS: access, _CACHE_OWNER: owner})
        await self._app(scope, receive, send)


def require_admin(request: Request) -> None:
    """Raise RequestError for a caller without the admin key. Routes use `admin_guard`, which checks more."""
    if getattr(request.state, _ACCESS) is not Access.ADMIN:
        raise _refusal(f"{request.url.path} needs the admin key")


def keys_from_environment(name: str, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Keys in a variable, separated by commas. Raises ConfigError for a variable with an empty key.

    An empty variable is more likely a mistake in a deployment than the wish to have no key.
    """
    if name not in environment:
        return ()
    keys = tuple(key.strip() for key in environment[name].split(","))
    if not all(keys):
        raise ConfigError(
            f"{name} is set, but a key in it is empty: unset it, or give keys separated by commas"
        )
    return keys


def _refusal(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key")


def _is_one_of(digest: bytes, known: Sequence[bytes]) -> bool:
    found = False
    for each in known:
        found |= hmac.compare_digest(digest, each)
    return found


def _given(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key as `Authorization` has it; Anthropic's clients send it as `x-api-key`."""
    values = dict(reversed([*headers]))  # the first of each name counts
    return values.get(b"authorization") or b"Bearer " + values.get(b"x-api-key", b"")


def _digest_of(authorization: bytes) -> bytes:
    """That of the key in a header; of the empty key if there is none."""
    scheme, _, token = authorization.partition(b" ")
    return _digest(token.strip() if scheme.lower() == b"bearer" else b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ----------------------------------------------------------------------------------------- admin routes
AdminGuard = Callable[[Request], Awaitable[None]]
"""Raises RequestError for a caller that may not use admin routes. It is a dependency of routes, or awaited in one."""

_OWN_SITE = ("same-origin", "none")
"""The values of Sec-Fetch-Site for the router's own page, and for an address that was typed."""


def admin_guard(keys: ApiKeys, host: str, allowed_origins: Sequence[str]) -> AdminGuard:
    """The guard of a router that listens on `host`. Where no key is set, it refuses pages of other sites.

    A browser sends the requests of any page, also to a router on this machine that needs no key. Pages cannot change
    the headers `Origin`, `Sec-Fetch-Site` and `Host`, by which such requests are recognized; `Host` is for DNS
    rebinding, where an attacker's name resolves to 127.0.0.1. Pages of `allowed_origins` may call; "*" allows none.
    """

    async def admin_only(request: Request) -> None:
        require_admin(request)
        if not (keys.has_clients or keys.has_admins):  # a page of another site has no key to send
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
