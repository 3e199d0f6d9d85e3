"""How the autoscaler carries its decisions out: it prints a line, runs the operator's command or calls a webhook.

decision      Printer  Command                 Webhook
add nodes     a line   CMD add ROLE N          POST {"action": "add", "role": .., "num_nodes": .., "reason": ..}
stop a node   a line   CMD drain NODE_ID ADDR  POST {"action": "drain", "role": .., "node_id": .., "address": ..,
                                                     "reason": ..}

The node to stop is empty. The router has drained and removed it before, except for a Printer, which stops nothing.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

import httpx
import msgspec

from shared.errors import ConfigError
from shared.log import warn
from shared.protocol.messages import Role


class ActionFailed(Exception):
    """A command or a webhook did not do what it was told; the message says why."""


class ScalingActions(Protocol):
    """Adds nodes and stops those that are empty. Both raise ActionFailed."""

    drains_nodes: bool
    """Whether the autoscaler may drain nodes, since `stop` then stops them."""

    async def add(self, role: Role, num_nodes: int, reason: str) -> None:
        """Start nodes, which join the router by themselves. Returns when they have been asked for."""
        ...

    async def stop(self, role: Role, node_id: str, address: str, reason: str) -> None:
        """Stop a node that is empty, and that the router has removed."""
        ...

    def close(self) -> None:
        """Leave nothing running."""
        ...


class Printer:
    """Prints what it would be told, on standard output."""

    drains_nodes = False

    async def add(self, role: Role, num_nodes: int, reason: str) -> None:
        """Print a line."""
        print(f"autoscale: add {num_nodes} {role} node{'s' * (num_nodes > 1)}: {reason}", flush=True)

    async def stop(self, role: Role, node_id: str, address: str, reason: str) -> None:
        """Print a line. The node has not been drained."""
        print(f"autoscale: drain {role} node {node_id} at {address}: {reason}", flush=True)

    def close(self) -> None:
        """Nothing runs."""


class Command:
    """Runs the operator's command, one at a time, without a shell. `environment` is added to that of this process.

    One that takes longer than `timeout_s` is ended, and killed if it has not ended `kill_s` later.
    """

    drains_nodes = True

    def __init__(
        self, command: str, timeout_s: float, environment: Mapping[str, str], *, kill_s: float = 5.0
    ) -> None:
        self._argv = shlex.split(command)
        self._timeout_s = timeout_s
        self._kill_s = kill_s
        self._environment = {**os.environ, **environment}
        self._turn = asyncio.Lock()
        self._starting = threading.Lock()
        """Held while a process starts: `close` comes from another thread, and must know of it."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    async def add(self, role: Role, num_nodes: int, reason: str) -> None:
        """Run `CMD add ROLE N`."""
        await self._run(reason, "add", role, str(num_nodes))

    async def stop(self, role: Role, node_id: str, address: str, reason: str) -> None:
        """Run `CMD drain NODE_ID ADDRESS`."""
        await self._run(reason, "drain", node_id, address)

    async def _run(self, reason: str, *words: str) -> None:
        async with self._turn:
            process = self._start(reason, *words)
            waiting = asyncio.ensure_future(asyncio.to_thread(process.wait))
            try:
                code = await asyncio.wait_for(asyncio.shield(waiting), self._timeout_s)
            except TimeoutError:
                await self._end(process, waiting)
                raise ActionFailed(
                    f"{self._argv[0]} {words[0]} took longer than {self._timeout_s:g} s"
                ) from None
            finally:
                if waiting.done():
                    self._process = None
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            raise ActionFailed(f"{self._argv[0]} {words[0]} ended with {how}")

    def close(self) -> None:
        """Kill the command that runs; none starts any more. Thread-safe."""
        with self._starting:
            self._is_closed = True
            if self._process is not None:
                _signal(self._process.pid, signal.SIGKILL)

    def _start(self, reason: str, *words: str) -> subprocess.Popen[bytes]:
        try:
            with self._starting:
                if self._is_closed:
                    raise ActionFailed("the autoscaler stops")
                self._process = subprocess.Popen(
                    [*self._argv, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # its words belong to the log
                    start_new_session=True,  # so that it can be ended with all that it started
                    env={**self._environment, "BATON_AUTOSCALE_REASON": reason},
                )
        except (OSError, ValueError) as error:  # ValueError: a word of a node has a null byte
            raise ActionFailed(f"{self._argv[0]} cannot be run: {error}") from None
        return self._process

    async def _end(self, process: subprocess.Popen[bytes], waiting: asyncio.Future[int]) -> None:
        _signal(process.pid, signal.SIGTERM)
        await asyncio.wait({waiting}, timeout=self._kill_s)
        _signal(process.pid, signal.SIGKILL)  # also what the command has started, if that ignores SIGTERM
        await waiting


class Webhook:
    """Posts JSON. An answer of 2xx says that it is taken care of; a redirect is not followed.

    Raises ConfigError for a URL that httpx cannot call.
    """

    drains_nodes = True

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--autoscale-webhook: {error}") from None
        self._name = f"webhook {self._url.scheme}://{self._url.netloc.decode()}"
        """For the log, without what may be secret: the user, the path and the query."""
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context()  # trusts what the system trusts, not what comes with httpx

    async def add(self, role: Role, num_nodes: int, reason: str) -> None:
        """Post {"action": "add", ...}."""
        await self._post({"action": "add", "role": role, "num_nodes": num_nodes, "reason": reason})

    async def stop(self, role: Role, node_id: str, address: str, reason: str) -> None:
        """Post {"action": "drain", ...}."""
        named = {"role": role, "node_id": node_id, "address": address}
        await self._post({"action": "drain", **named, "reason": reason})

    def close(self) -> None:
        """A call ends with its task."""

    async def _post(self, body: Mapping[str, object]) -> None:
        content, headers = msgspec.json.encode(body), {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._timeout_s),  # httpx counts it anew with each byte
                httpx.AsyncClient(timeout=None, verify=self._tls) as client,
                client.stream("POST", self._url, content=content, headers=headers) as answer,
            ):
                pass  # whatever it says besides the status is not waited for
        except TimeoutError:
            raise ActionFailed(f"{self._name} took longer than {self._timeout_s:g} s") from None
        except (
            httpx.HTTPError,
            OSError,
            httpx.InvalidURL,  # a wrong HTTP_PROXY raises this and those below
            ValueError,
            ImportError,
            ExceptionGroup,
        ) as error:
            raise ActionFailed(f"{self._name}: {_why(error)}") from None
        if not answer.is_success:
            words = "; redirects are not followed" if answer.has_redirect_location else ""
            raise ActionFailed(
                f"{self._name} answered {answer.status_code} {answer.reason_phrase[:80]}{words}"
            )


def _why(error: BaseException) -> str:
    """For a connection that fails, what the system said of each attempt: httpx says that all failed."""
    if isinstance(error, httpx.NetworkError | ExceptionGroup):
        return "; ".join(dict.fromkeys(_first_causes(error)))
    return str(error) or type(error).__name__


def _first_causes(error: BaseException) -> Iterator[str]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _first_causes(one)
    elif deeper := error.__cause__ or error.__context__:
        yield from _first_causes(deeper)
    else:
        yield str(error) or type(error).__name__


def _signal(group: int, signum: signal.Signals) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        pass  # it has ended
    except PermissionError as error:
        warn("command_not_ended", group=group, reason=error)  # it runs as another user
