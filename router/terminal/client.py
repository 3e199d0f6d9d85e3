"""A client of one router, over the standard library's HTTP: event streams, single answers, readable errors."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec

_MAX_ERROR_BYTES = 1 << 20


class ClientError(Exception):
    """A request did not succeed; the message is for people.

    `status` and `body` are the router's; 0 when none answers.
    """

    def __init__(self, message: str, status: int = 0, body: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.body = status, body


class RouterClient:
    """A client with a URL and a key. Every call has a connection of its own.

    With `certificate`, a file in PEM, a router over HTTPS must show that one, and its host name does not matter.
    """

    def __init__(self, url: str, api_key: str | None, certificate: Path | None = None) -> None:
        self.url = url if "://" in url else f"http://{url}"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if certificate is not None:
            handlers.append(urllib.request.HTTPSHandler(context=_trust(certificate)))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, timeout_s: float) -> bytes:
        """The body of a GET. Raises ClientError."""
        with self._response(path, None, timeout_s) as response:
            return response.read()

    def delete(self, path: str, timeout_s: float) -> bytes:
        """The body of the answer to a DELETE. Raises ClientError."""
        with self._response(path, None, timeout_s, "DELETE") as response:
            return response.read()

    def events(
        self, path: str, body: object = None, *, silence_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """The payloads of an event stream, of a POST if there is a body. Raises ClientError, also for an error event.

        `silence_s` bounds the wait for the next event. Closing the iterator disconnects, which aborts the request.
        """
        with self._response(path, body, silence_s) as response:
            for line in response:
                payload = line.removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    return
                if payload.startswith(b'{"error"'):
                    raise ClientError(_message(payload) or "the router ended the stream with an error")
                if payload:
                    yield payload
        raise ClientError(f"{self.url} ended the stream")

    @contextlib.contextmanager
    def _response(
        self, path: str, body: object, timeout_s: float, method: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        content = None if body is None else msgspec.json.encode(body)
        try:
            request = urllib.request.Request(
                self.url.rstrip("/") + path, content, self._headers, method=method
            )
            with self._opener.open(request, timeout=timeout_s) as response:
                yield response
        except urllib.error.HTTPError as e:
            with e:
                content = e.read(_MAX_ERROR_BYTES)
            message = _message(content) or f"{self.url} answered {e.code} {e.reason}"
            raise ClientError(message, e.code, content) from None
        except TimeoutError:
            raise ClientError(f"{self.url} is silent") from None
        except (OSError, http.client.HTTPException) as e:
            reason = e.reason if isinstance(e, urllib.error.URLError) else e
            words = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
            raise ClientError(f"no router answers at {self.url}: {words}") from None
        except ValueError as e:
            raise ClientError(
                f"{self.url!r} is not a URL of a router, such as http://127.0.0.1:8000: {e}"
            ) from None


def _trust(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the router is dialled by a number
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file need not have the authority
    context.load_verify_locations(certificate)
    return context


def printable(text: str) -> str:
    """`text` without characters that control a terminal, since models and nodes may send any."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def _message(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body)["error"]
        return printable(error if isinstance(error, str) else str(error["message"]))
    except (msgspec.DecodeError, TypeError, KeyError):
        return ""  # not a router's error; the status has to do
