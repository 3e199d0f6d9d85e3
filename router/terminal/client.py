"""A client of one router: JSON and event streams over the standard library's HTTP, every failure in words.

ClientError
├── Unreachable   nobody answers there, or the connection broke: trying again may help
└── Refused       the router answered with an error; `status` is its HTTP status
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import urllib.parse
from collections.abc import Generator, Iterator

import msgspec

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "BATON_API_KEY"

_CONNECT_TIMEOUT_S = 5.0
_MAX_ERROR_BYTES = 1 << 20
_DONE = b"[DONE]"


class ClientError(Exception):
    """A request did not succeed; the message is for people."""


class Unreachable(ClientError):
    """There is no router at the URL, or there no longer is."""


class Refused(ClientError):
    """The router refused or failed the request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RouterClient:
    """Knows the URL and the key; every call has a connection of its own, closed when the call is over."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parsed = urllib.parse.urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parsed.port
        except ValueError as e:
            raise ClientError(f"{url!r} is not a URL: {e}") from None
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise ClientError(f"{url!r} is not a URL of a router, such as {DEFAULT_URL}")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ClientError("the API key has characters that no header can carry")
        self.url = url
        self._kind = http.client.HTTPSConnection if parsed.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parsed.hostname, port
        self._prefix = parsed.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str, timeout_s: float) -> bytes:
        """The body of a GET. Raises ClientError."""
        with self._response("GET", path, None, timeout_s) as response:
            return response.read()

    def events(
        self, path: str, body: object = None, *, silence_s: float | None = None
    ) -> Generator[bytes, None, None]:
        """The payloads of an event stream; a POST if there is a body. Raises ClientError, also for an error event.

        `silence_s` bounds the wait for the next event. Closing the iterator hangs up, which aborts the request.
        """
        method = "GET" if body is None else "POST"
        with self._response(method, path, body, silence_s) as response:
            for line in response:
                payload = line.removeprefix(b"data:").strip()
                if payload == _DONE:
                    return
                if payload:
                    _raise_if_error(payload)
                    yield payload
            raise Unreachable(f"{self.url} ended the stream early")

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: object, timeout_s: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        headers, content = self._headers, None
        if body is not None:
            headers, content = headers | {"Content-Type": "application/json"}, _encoded(body)
        connection = self._kind(self._host, self._port, timeout=_CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(timeout_s)
            connection.request(method, self._prefix + path, content, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            yield response
        except TimeoutError:
            raise Unreachable(f"{self.url} is silent") from None
        except (OSError, http.client.HTTPException) as e:
            reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e) or type(e).__name__
            raise Unreachable(f"no router answers at {self.url}: {reason}") from None
        finally:
            connection.close()


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Add --url and --api-key."""
    parser.add_argument("--url", default=DEFAULT_URL, help="where the router serves")
    parser.add_argument(
        "--api-key",
        default=argparse.SUPPRESS,
        metavar="KEY",
        help=f"if the router asks for one; ${KEY_VARIABLE} is the better place, since `ps` does not show it",
    )


def client_of(args: argparse.Namespace) -> RouterClient:
    """The client that the flags of `add_client_flags` describe. Raises ClientError."""
    return RouterClient(args.url, getattr(args, "api_key", None) or os.environ.get(KEY_VARIABLE))


def printable(text: str) -> str:
    """`text` without what would control a terminal: models and nodes may say anything."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def _encoded(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # bytes of the command line or of standard input that are not text
        raise ClientError("the prompt is not valid UTF-8") from None


def _raise_if_error(payload: bytes) -> None:
    if payload.startswith(b'{"error"'):
        raise Refused(_message(payload) or "the router ended the stream with an error", 0)


def _refused(response: http.client.HTTPResponse) -> Refused:
    body = response.read(_MAX_ERROR_BYTES)
    message = _message(body) or f"it answered {response.status} {response.reason}"
    wait = response.headers.get("Retry-After")
    if response.status == 429 and wait:
        message += f" (try again in {wait} s)"
    return Refused(message, response.status)


def _message(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body)["error"]
        return printable(error if isinstance(error, str) else str(error["message"]))
    except (msgspec.DecodeError, TypeError, KeyError):
        return ""  # not a router's error; the status has to do
