"""The autoscaler beside a router: what it hears, what it tells a command or a webhook, and what may fail of that."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from planner.autoscaler.command import autoscalers_of
from planner.autoscaler.decision import Autoscaler, NodeBounds, NodeState, Pace
from planner.autoscaler.fleet_client import FleetClient, FleetNode
from planner.autoscaler.observe import FleetLoads, LoadReport, NodeReport
from planner.autoscaler.scaling_actions import ActionFailed, Command, Printer, Webhook
from planner.autoscaler.watch import Watch
from router.http.config import AutoscaleOptions, HttpOptions, PlanOptions
from router.http.topology import ScaledRole
from router.terminal.client import ClientError, RouterClient
from shared.errors import ConfigError
from shared.protocol.messages import Load, Role
from tests.patience import PATIENCE_S, eventually, until
from tests.processes import assert_gone
from tests.sim.test_autoscaler import CAPACITY, PROFILE
from tests.unit.router.fakes import joined_router, pair, write_model
from tests.unit.router.test_tls import make_certificate

PACE = Pace(start_s=20.0, settle_s=30.0, window_s=60.0)


def node(name: str, state: str = "alive", **load: int) -> FleetNode:
    return FleetNode(
        node_id=name, state=state, role=Role.DECODE, address=f"tcp://{name}:7200", incarnation=name,
        load=LoadReport(num_pages=1024, **load) if state == "alive" else None,
    )  # fmt: skip


class FakeRouter:
    """A FleetApi: the test says which nodes there are, and which calls fail."""

    def __init__(self, *nodes: FleetNode) -> None:
        self.found = list(nodes)
        self.errors: list[ClientError] = []
        self.removed: list[tuple[str, float]] = []

    def nodes(self) -> dict[Role, list[FleetNode]]:
        return {Role.PREFILL: [], Role.DECODE: list(self.found)}

    def remove(self, node_id: str, drain_timeout_s: float) -> None:
        self.removed.append((node_id, drain_timeout_s))
        if self.errors:
            raise self.errors.pop(0)
        self.found = [node for node in self.found if node.node_id != node_id]


class FakeActions:
    """Remembers what it was told; `failures` times it cannot."""

    drains_nodes = True

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.failures = 0

    async def add(self, role: Role, num_nodes: int, reason: str) -> None:
        self._tell("add", role, num_nodes)

    async def stop(self, role: Role, node_id: str, address: str, reason: str) -> None:
        self._tell("drain", role, node_id, address)

    def close(self) -> None:
        self.told.append(("close",))

    def _tell(self, *words: object) -> None:
        self.told.append(words)
        if self.failures:
            self.failures -= 1
            raise ActionFailed("it does not work")


class Bed:
    """A watch with a clock that the test moves."""

    def __init__(self, router: FakeRouter, actions: Any, least: int = 1, most: int = 4) -> None:
        self.now = 0.0
        autoscaler = Autoscaler(Role.DECODE, NodeBounds(least, most), PACE, CAPACITY)
        self.watch = Watch(
            router, [autoscaler], actions, drain_timeout_s=7.0, pause_s=0.01, clock=lambda: self.now
        )

    async def run(self, seconds: float) -> None:
        until_s = self.now + seconds
        while self.now < until_s:
            await self.watch.turn()
            await self.watch.settled()
            self.now += PACE.interval_s


def test_nodes_that_are_missing_are_asked_for_once_and_again_when_they_do_not_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actions = FakeActions()
    bed = Bed(FakeRouter(node("d0")), actions, least=3)
    asyncio.run(bed.run(PACE.settle_s + PACE.start_limit_s))
    assert actions.told == [("add", Role.DECODE, 2)]
    asyncio.run(bed.run(10.0))
    assert actions.told == 2 * [("add", Role.DECODE, 2)]
    assert "nodes_overdue role=decode num_nodes=2" in caplog.text


def test_a_bug_in_an_action_is_logged_and_nodes_are_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeActions):
        async def add(self, role: Role, num_nodes: int, reason: str) -> None:
            await super().add(role, num_nodes, reason)
            raise ZeroDivisionError("a bug")

    actions = Broken()
    asyncio.run(Bed(FakeRouter(node("d0")), actions, least=3).run(PACE.settle_s + PACE.start_limit_s + 10.0))
    assert "autoscale_task_failed" in caplog.text and "ZeroDivisionError: a bug" in caplog.text
    assert actions.told == 2 * [("add", Role.DECODE, 2)]


def test_a_node_that_loads_counts_after_the_autoscaler_was_started_again() -> None:
    actions = FakeActions()
    loading = FleetNode(node_id="d1", state="loading")
    asyncio.run(Bed(FakeRouter(node("d0"), loading), actions, least=2).run(PACE.settle_s + 20))
    assert actions.told == []


def test_an_add_that_fails_is_tried_again_after_a_pause() -> None:
    actions = FakeActions()
    bed = Bed(FakeRouter(node("d0")), actions, least=2)
    actions.failures = 2
    asyncio.run(bed.run(PACE.settle_s + 5 * PACE.interval_s))
    assert actions.told == 3 * [("add", Role.DECODE, 1)]


def test_no_add_within_the_pause() -> None:
    actions = FakeActions()
    bed = Bed(FakeRouter(node("d0")), actions, least=2)
    bed.watch._pause_s = 50.0  # shorter than a node that was asked for would count
    actions.failures = 1
    asyncio.run(bed.run(PACE.settle_s + 50.0))
    assert len(actions.told) == 1
    asyncio.run(bed.run(20.0))
    assert len(actions.told) == 2


def test_an_add_that_fails_late_is_tried_again_for_all_its_nodes() -> None:
    class Slow(FakeActions):
        async def add(self, role: Role, num_nodes: int, reason: str) -> None:
            bed.now += 1.0
            await super().add(role, num_nodes, reason)

    actions = Slow()
    actions.failures = 1
    bed = Bed(FakeRouter(node("d0")), actions, least=3)
    asyncio.run(bed.run(PACE.settle_s + 6 * PACE.interval_s))
    assert actions.told == 2 * [("add", Role.DECODE, 2)]


def test_nodes_given_up_while_their_add_hangs_are_not_asked_for_a_second_time() -> None:
    """Each of the adds would run once the first has ended, and its nodes start only then."""

    class Hanging(FakeActions):
        async def add(self, role: Role, num_nodes: int, reason: str) -> None:
            await super().add(role, num_nodes, reason)
            await ends.wait()

    ends = asyncio.Event()
    actions = Hanging()
    bed = Bed(FakeRouter(node("d0")), actions, least=2)

    async def look_for(seconds: float) -> None:
        for _ in range(int(seconds / PACE.interval_s)):
            bed.now += PACE.interval_s
            await bed.watch.turn()
            await asyncio.sleep(0)

    async def run() -> None:
        await look_for(PACE.settle_s + 3.5 * PACE.start_limit_s)
        assert actions.told == [("add", Role.DECODE, 1)]
        ends.set()
        await bed.watch.settled()
        await look_for(PACE.start_limit_s - PACE.interval_s)
        assert actions.told == [("add", Role.DECODE, 1)]
        await look_for(PACE.interval_s)
        assert actions.told == 2 * [("add", Role.DECODE, 1)]

    asyncio.run(run())


def test_an_add_that_hangs_stops_no_add_of_the_other_role() -> None:
    class Hanging(FakeActions):
        async def add(self, role: Role, num_nodes: int, reason: str) -> None:
            await super().add(role, num_nodes, reason)
            await asyncio.sleep(PATIENCE_S)

    class Both(FakeRouter):
        def nodes(self) -> dict[Role, list[FleetNode]]:
            return {role: list(self.found) for role in Role}

    actions, router = Hanging(), Both(node("d0"))
    bed = Bed(router, actions)
    scalers = [Autoscaler(role, NodeBounds(2, 4), PACE, CAPACITY) for role in Role]
    bed.watch = Watch(router, scalers, actions, drain_timeout_s=7.0, clock=lambda: bed.now)

    async def run() -> None:
        for _ in range(10):
            bed.now += PACE.interval_s
            await bed.watch.turn()
            await asyncio.sleep(0)

    asyncio.run(run())
    assert sorted(actions.told) == sorted(("add", role, 1) for role in Role)


def test_a_node_that_took_the_other_role_between_two_looks_was_drained() -> None:
    """It is not lost, which would be waited for."""

    class Changing(FakeRouter):
        def nodes(self) -> dict[Role, list[FleetNode]]:
            role = Role.PREFILL if bed.now >= PACE.settle_s else Role.DECODE
            found = {Role.PREFILL: [node("p0")], Role.DECODE: [node("d0")]}
            found[role].append(node("d1"))
            return found

    actions = FakeActions()
    bed = Bed(Changing(), actions, least=2)
    asyncio.run(bed.run(2 * PACE.settle_s))
    assert actions.told == []
    asyncio.run(bed.run(PACE.interval_s))
    assert actions.told == [("add", Role.DECODE, 1)]


def test_a_node_is_drained_at_the_router_and_then_stopped() -> None:
    """Neither a router that is away for a moment nor a command that fails once ends that."""
    actions, router = FakeActions(), FakeRouter(node("d0"), node("d1", num_running=3))
    router.errors = [ClientError("no router answers"), ClientError("starting", 503)]
    actions.failures = 2
    asyncio.run(Bed(router, actions).run(PACE.window_s + 3 * PACE.interval_s))
    assert router.removed == 3 * [("d0", 7.0)]
    assert actions.told == 3 * [("drain", Role.DECODE, "d0", "tcp://d0:7200")]


def test_a_node_that_the_router_keeps_is_not_stopped() -> None:
    actions, router = FakeActions(), FakeRouter(node("d0"), node("d1"))
    router.errors = [ClientError("it was added again", 409)]
    asyncio.run(Bed(router, actions).run(PACE.window_s + 3 * PACE.interval_s))
    assert router.removed == [("d0", 7.0)] and actions.told == []


def test_where_decisions_are_printed_nothing_is_drained(capsys: pytest.CaptureFixture[str]) -> None:
    router = FakeRouter(node("d0"), node("d1"))
    asyncio.run(Bed(router, Printer()).run(PACE.window_s + 3 * PACE.interval_s))
    assert router.removed == []
    assert (
        "autoscale: drain decode node d0 at tcp://d0:7200: 0 nodes needed, 2 live" in capsys.readouterr().out
    )


def test_while_the_router_does_not_answer_nothing_is_decided(caplog: pytest.LogCaptureFixture) -> None:
    """A router that was restarted knows its nodes only after a while: those that were there count as coming back."""
    actions, router = FakeActions(), FakeRouter(node("d0"), node("d1"))
    bed = Bed(router, actions, least=2)
    asyncio.run(bed.run(PACE.settle_s + 10.0))
    nodes, router.nodes = router.nodes, lambda: raising(ClientError("no router answers"))  # type: ignore[method-assign]
    asyncio.run(bed.run(300.0))
    router.nodes, router.found = nodes, []  # type: ignore[method-assign]
    asyncio.run(bed.run(20.0))
    assert actions.told == [] and caplog.text.count("router_not_reached") == 1
    router.nodes = lambda: raising(ClientError("wrong key", 401))  # type: ignore[method-assign]
    with pytest.raises(ClientError, match="wrong key"):
        asyncio.run(bed.run(5.0))


def test_what_others_drain_is_said_once_and_counts_for_the_settling_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actions, router = FakeActions(), FakeRouter(node("d0"), node("d1"))
    bed = Bed(router, actions, least=2)
    asyncio.run(bed.run(PACE.settle_s + 10.0))
    router.found = [node("d0"), node("d1", "draining")]
    asyncio.run(bed.run(PACE.settle_s))
    assert actions.told == [] and caplog.text.count("drained_by_others node=d1") == 1
    asyncio.run(bed.run(10.0))
    assert actions.told == [("add", Role.DECODE, 1)]


def raising(error: Exception) -> Any:
    raise error


# ------------------------------------------------------------------------------------------------- actions
def script(folder: Path, text: str) -> str:
    path = folder / "command with a space"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return f"'{path}' --zone 'a b'"


def test_a_command_gets_words_and_environment(tmp_path: Path) -> None:
    told = tmp_path / "told"
    line = script(tmp_path, f'echo "$#:$*:$BATON_CONTROL_ADDRESS:$BATON_AUTOSCALE_REASON" >> {told}')
    command = Command(line, 60.0, {"BATON_CONTROL_ADDRESS": "host:8001"})

    async def run() -> None:
        await command.add(Role.PREFILL, 2, "much; $(to do)")
        await command.stop(Role.PREFILL, "p0", "tcp://p0:7100", "little to do")

    asyncio.run(run())
    assert told.read_text().splitlines() == [
        "5:--zone a b add prefill 2:host:8001:much; $(to do)",
        "5:--zone a b drain p0 tcp://p0:7100:host:8001:little to do",
    ]


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ActionFailed, match="command with a space add ended with exit code 3"):
        asyncio.run(Command(script(tmp_path, "exit 3"), 60.0, {}).add(Role.DECODE, 1, ""))
    with pytest.raises(ActionFailed, match=r"/nowhere cannot be run: .*No such file"):
        asyncio.run(Command("/nowhere", 60.0, {}).add(Role.DECODE, 1, ""))
    with pytest.raises(ActionFailed, match="cannot be run: embedded null byte"):
        asyncio.run(Command(script(tmp_path, ""), 60.0, {}).stop(Role.DECODE, "d\0", "", ""))
    line = script(tmp_path, f"kill -{signal.SIGRTMIN + 1} $$")  # which has no name
    with pytest.raises(ActionFailed, match=f"add ended with signal {signal.SIGRTMIN + 1}"):
        asyncio.run(Command(line, 60.0, {}).add(Role.DECODE, 1, ""))


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    line = script(tmp_path, f"sleep 60 & echo $! > {pids}; echo $$ >> {pids}; wait")
    with pytest.raises(ActionFailed, match=r"add took longer than 0\.5 s"):
        asyncio.run(Command(line, 0.5, {}).add(Role.DECODE, 1, ""))
    assert_gone([psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))])


def test_commands_run_one_after_the_other_and_their_words_belong_to_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = Command(script(tmp_path, "echo begun; sleep 0.2; echo done"), PATIENCE_S, {})

    async def run() -> None:
        await asyncio.gather(*(command.add(Role.DECODE, 1, "") for _ in range(2)))

    asyncio.run(run())
    assert capfd.readouterr() == ("", "begun\ndone\nbegun\ndone\n")


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    late = tmp_path / "late"
    line = script(tmp_path, f"trap '' TERM; sleep 20; touch {late}")
    with pytest.raises(ActionFailed, match="took longer"):
        asyncio.run(Command(line, 0.5, {}, kill_s=0.1).add(Role.DECODE, 1, ""))
    assert not late.exists()


def test_no_signal_goes_to_a_command_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process id may be another's."""
    sent: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "killpg", lambda *words: sent.append(words))
    command = Command(script(tmp_path, ""), 60.0, {})
    asyncio.run(command.add(Role.DECODE, 1, ""))
    command.close()
    assert not sent


def test_a_command_that_has_just_started_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router may be gone at any time: a thread closes while the command is being started."""
    started = threading.Event()

    class SlowToStart(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.set()
            time.sleep(0.2)

    monkeypatch.setattr(subprocess, "Popen", SlowToStart)
    command = Command(script(tmp_path, "exec sleep 60"), PATIENCE_S, {})

    def close() -> None:
        started.wait()
        command.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    with pytest.raises(ActionFailed, match="add ended with signal 9"):
        asyncio.run(command.add(Role.DECODE, 1, ""))
    closing.join()
    with pytest.raises(ActionFailed, match="the autoscaler stops"):
        asyncio.run(command.add(Role.DECODE, 1, ""))


def test_a_command_that_takes_too_long_is_given_time_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / "ended"
    signals: list[tuple[int, bool]] = []
    monkeypatch.setattr(os, "killpg", lambda group, signum: signals.append((signum, ended.exists())))
    with pytest.raises(ActionFailed, match="took longer"):
        asyncio.run(Command(script(tmp_path, f"sleep 0.5; touch {ended}"), 0.1, {}).add(Role.DECODE, 1, ""))
    assert signals == [(signal.SIGTERM, False), (signal.SIGKILL, True)]


def test_a_command_of_another_user_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(group: int, signum: int) -> None:
        raise PermissionError(f"{group} is not yours")

    monkeypatch.setattr(os, "killpg", refuse)
    ended = tmp_path / "ended"
    command = Command(script(tmp_path, f"sleep 0.5; touch {ended}"), 0.1, {}, kill_s=0.05)

    async def run() -> None:
        with pytest.raises(ActionFailed, match=r"add took longer than 0\.1 s"):
            await command.add(Role.DECODE, 1, "")
        assert ended.exists()

    asyncio.run(run())
    assert caplog.text.count("command_not_ended") == 2 and "is not yours" in caplog.text


@contextmanager
def http_server(answer: Callable[[str], tuple[int, object]]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server on loopback: its URL, and the paths and bodies that it got."""
    got: list[tuple[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            got.append((self.path, json.loads(body) if body else None))
            status, content = answer(self.path)
            sent = json.dumps(content).encode()
            with contextlib.suppress(ConnectionError):  # the client may be gone
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                if 300 <= status < 400:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(sent)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", got
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("url", ["http://me:secret@256.256.256.256/", "http://münch..en/", "http://a/\n"])
def test_a_webhook_that_httpx_cannot_call_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--autoscale-webhook: Invalid") as refused:
        Webhook(url, 60.0)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "timeout_s", "words"),
    [(500, 60.0, " answered 500"), (200, 0.2, " took longer"), (0, 60.0, ": ")],
)
def test_the_secrets_of_a_webhook_are_not_told(status: int, timeout_s: float, words: str) -> None:
    release = threading.Event()

    def answer(path: str) -> tuple[int, object]:
        if timeout_s < 1.0:
            release.wait()
        return status, {}

    with http_server(answer) as (url, _):
        if not status:
            url = "http://127.0.0.1:1"
        try:
            secret = url.replace("//", "//me:secret@") + "/secret?key=secret"
            with pytest.raises(ActionFailed, match=f"^webhook {re.escape(url)}{words}") as failed:
                asyncio.run(Webhook(secret, timeout_s).add(Role.DECODE, 1, ""))
            assert "secret" not in str(failed.value)
        finally:
            release.set()


def test_each_address_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", 1)) for n in (1, 2)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **how: found)
    with pytest.raises(ActionFailed, match=r"'127\.0\.0\.1', 1\); .*'127\.0\.0\.2', 1\)"):
        asyncio.run(Webhook("http://twice:1/hook", 60.0).add(Role.DECODE, 1, ""))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_webhook_that_redirects_has_done_nothing(status: int) -> None:
    """/elsewhere would answer 200, which would count as done."""
    with http_server(lambda path: (status if path == "/hook" else 200, {})) as (url, got):
        with pytest.raises(ActionFailed, match=f"answered {status} .*; redirects are not followed"):
            asyncio.run(Webhook(f"{url}/hook", 60.0).add(Role.DECODE, 2, "much to do"))
        assert [path for path, _ in got] == ["/hook"]


def test_a_webhook_gets_json() -> None:
    with http_server(lambda path: (200 if path == "/hook" else 500, {})) as (url, got):
        asyncio.run(Webhook(f"{url}/hook", 60.0).add(Role.DECODE, 2, "much to do"))
        asyncio.run(Webhook(f"{url}/hook", 60.0).stop(Role.DECODE, "d0", "tcp://d0:7200", "idle"))
        assert [body for _, body in got] == [
            {"action": "add", "role": "decode", "num_nodes": 2, "reason": "much to do"},
            {
                "action": "drain",
                "role": "decode",
                "node_id": "d0",
                "address": "tcp://d0:7200",
                "reason": "idle",
            },
        ]
        with pytest.raises(ActionFailed, match=f"^webhook {url} answered 500"):
            asyncio.run(Webhook(f"{url}/wrong", 60.0).add(Role.DECODE, 1, ""))
    with pytest.raises(ActionFailed, match=r"^webhook http://127.0.0.1:\d+: .*Connect call failed"):
        asyncio.run(Webhook(f"{url}/hook", 60.0).add(Role.DECODE, 1, ""))


@pytest.mark.parametrize(
    ("proxy", "words"),
    [
        ("socks5://127.0.0.1:1", "socksio"),
        ("ftp://127.0.0.1", "ftp://127.0.0.1"),
        ("http://127.0.0.1:99999", "port"),
        ("http://[::1", "Invalid port"),
    ],
)
def test_a_proxy_that_is_none_is_named(proxy: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(ActionFailed, match=f"^webhook http://127.0.0.1:1: .*{words}"):
        asyncio.run(Webhook("http://127.0.0.1:1/hook", 60.0).add(Role.DECODE, 1, ""))


def test_a_webhook_that_answers_byte_by_byte_is_not_waited_for() -> None:
    """It is left with nothing of the call: each time the connection is closed, and no thread stays."""
    num_left = 0

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_left
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.01)
        num_left += 1

    async def run() -> None:
        async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
            hook = Webhook(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 0.2)
            threads = set(threading.enumerate())
            calls = [asyncio.create_task(hook.add(Role.DECODE, 1, "")) for _ in range(6)]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, ActionFailed) and "took longer than 0.2 s" in str(error)
            await eventually(lambda: num_left == len(calls))
            assert set(threading.enumerate()) <= threads

    asyncio.run(run())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_a_webhook_trusts_the_authorities_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are OpenSSL's when it is made. httpx would take its own: the variable is gone when it is called."""
    ours = make_certificate(tmp_path, "ours")
    assert ours.ssl_certfile is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(ours.ssl_certfile, ours.ssl_keyfile)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()

    async def run() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
            monkeypatch.setenv("SSL_CERT_FILE", str(ours.ssl_certfile))
            hook = Webhook(url, 60.0)
            monkeypatch.delenv("SSL_CERT_FILE")
            await hook.add(Role.DECODE, 1, "")
            with pytest.raises(ActionFailed, match=r"^webhook \S+: .*certificate verify failed"):
                await Webhook(url, 60.0).add(Role.DECODE, 1, "")

    asyncio.run(run())


def test_a_webhook_that_is_no_http_server_has_done_nothing() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\r\n\r\n")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            await Webhook(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 60.0).add(
                Role.DECODE, 1, ""
            )

    with pytest.raises(ActionFailed, match=r":\d+: (\[Errno \d+\] |illegal status line)"):
        asyncio.run(run())


# ------------------------------------------------------------------------------------------- a real router
def test_a_real_router_lists_its_nodes_and_drains_one(tmp_path: Path) -> None:
    async def run() -> None:
        http_options = HttpOptions(port=0, admin_api_keys=("secret",))
        folder = write_model(tmp_path)
        async with pair() as nodes, joined_router(folder, list(nodes), http=http_options) as (_, http):
            prefill, decode = nodes
            decode.load = Load(num_pages=10, num_running=3, num_prompts=5)
            client = FleetClient(RouterClient(str(http.base_url), "secret"))

            async def load() -> LoadReport | None:
                (found,) = (await asyncio.to_thread(client.nodes))[Role.DECODE]
                assert (found.node_id, found.state) == (decode.ref.node_id, "alive")
                return found.load

            await eventually(lambda: load_is(load, LoadReport(num_pages=10, num_running=3, num_prompts=5)))
            await asyncio.to_thread(client.remove, prefill.ref.node_id, 1.0)
            assert (await asyncio.to_thread(client.nodes))[Role.PREFILL] == []
            await asyncio.to_thread(
                client.remove, prefill.ref.node_id, 1.0
            )  # it is gone, which is what was asked
            with pytest.raises(ClientError) as refused:
                await asyncio.to_thread(FleetClient(RouterClient(str(http.base_url), None)).nodes)
            assert refused.value.status == 401

    async def load_is(load: Callable[[], Any], wanted: LoadReport) -> bool:
        return bool(await load() == wanted)

    asyncio.run(run())


def test_nodes_that_load_are_known_while_the_router_is_not_ready_for_the_lack_of_them() -> None:
    health = {"prefill": [], "decode": [{"node_id": "d1", "state": "loading", "what": "weights"}]}
    answers = {"/fleet": (200, {"nodes": []}), "/health": (503, health)}
    with http_server(lambda path: answers[path]) as (url, _):
        found = FleetClient(RouterClient(url, None)).nodes()
        assert [(node.name, node.state) for node in found[Role.DECODE]] == [("d1", "loading")]
        answers["/health"] = (200, {"status": "not one of ours"})
        with pytest.raises(ClientError, match="answers as no router of this release"):
            FleetClient(RouterClient(url, None)).nodes()


def test_a_fleet_that_starts_is_not_added_to() -> None:
    actions, router = FakeActions(), FakeRouter()
    bed = Bed(router, actions)
    asyncio.run(bed.run(PACE.start_limit_s - 5.0))
    assert actions.told == []
    asyncio.run(bed.run(10.0))
    assert actions.told == [("add", Role.DECODE, 1)]


@contextmanager
def autoscale(folder: Path, bounds: str, *flags: str, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The process `python -m planner autoscale`."""
    PROFILE.save(folder / "profile.json")
    plan = ("--plan-profile", str(folder / "profile.json"), "--slo-ttft-ms", "1000", "--slo-itl-ms", "30")
    pace = ("--autoscale-settle-s", "1", "--autoscale-window-s", "10", "--autoscale-interval-s", "0.5")
    argv = [sys.executable, "-m", "planner", "autoscale", "--autoscale", bounds, *plan, *pace, *flags]
    process = subprocess.Popen(argv, **how)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def listed(*names: str) -> dict[str, object]:
    """What GET /fleet says of these decode nodes."""
    nodes = [
        {"node_id": name, "state": "alive", "role": "decode", "address": f"tcp://{name}:7200",
         "incarnation": name, "load": {"num_pages": 1024}} for name in names
    ]  # fmt: skip
    return {"nodes": nodes}


@pytest.mark.processes
def test_the_process_and_its_command_end_with_the_router(tmp_path: Path) -> None:
    """Standard input is the router's socket: a key comes first, and its end is the router's."""
    pid = tmp_path / "pid"
    line = script(tmp_path, f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 1000")
    answers = {"/fleet": listed("d0"), "/health": {"prefill": [], "decode": []}}
    ours, theirs = socket.socketpair()
    with ours, theirs, http_server(lambda path: (200, answers[path])) as (url, _):
        flags = ("--autoscale-command", line, "--url", url, "--exit-with-parent")
        with autoscale(tmp_path, "decode=2..3", *flags, stdin=theirs) as process:
            theirs.close()
            ours.sendall(b"secret\n")
            assert ours.recv(16) == b"LR"
            until(pid.exists, "the command runs")
            command = psutil.Process(int(pid.read_text()))
            ours.close()
            assert process.wait(PATIENCE_S) == 1
            assert_gone([command])


@pytest.mark.processes
def test_the_process_ends_while_a_drain_is_under_way(tmp_path: Path) -> None:
    drained = threading.Event()
    answers = {"/fleet": listed("d0", "d1"), "/health": {"prefill": [], "decode": []}}

    def answer(path: str) -> tuple[int, object]:
        if path not in answers:  # a DELETE, which is answered when the node is empty
            drained.wait()
        return 200, answers.get(path, {})

    with http_server(answer) as (url, got):
        flags = ("--autoscale-command", "true", "--url", url)
        with autoscale(tmp_path, "decode=1..2", *flags) as process:
            try:
                until(lambda: any(path.startswith("/fleet/nodes/") for path, _ in got), "a node is drained")
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 0
            finally:
                drained.set()


# ---------------------------------------------------------------------------------------------- loads
def report(incarnation: str, **load: Any) -> NodeReport:
    return NodeReport(
        node_id=incarnation, state=NodeState.LIVE, incarnation=incarnation, load=LoadReport(**load)
    )


def test_rates_are_differences_and_a_node_that_restarts_or_comes_adds_nothing() -> None:
    loads = FleetLoads(Role.PREFILL)
    old = {"num_prompts": 7, "num_prompt_tokens": 9000, "num_cached_tokens": 2000}
    assert loads.observe(0.0, [report("a", **old)]).work is None
    new = {"num_prompts": 9, "num_prompt_tokens": 11_000, "num_cached_tokens": 2500, "num_queued_tokens": 500}
    work = loads.observe(10.0, [report("a", **new), report("b", **old)]).work
    assert work is not None
    assert work.prompt_tokens_s == (1500 + 500) / 10
    assert (work.tokens_per_prompt, work.cached_per_prompt) == (1000.0, 250.0)
    work = loads.observe(20.0, [report("a", **new), report("b2", num_prompts=1)]).work
    assert work is not None and work.prompt_tokens_s == (1500 + 500) / 20


def test_rates_are_of_the_last_seconds() -> None:
    loads = FleetLoads(Role.DECODE)
    for second in range(0, 101, 5):
        work = loads.observe(float(second), [report("a", num_generated_tokens=100 * min(second, 40))]).work
        if second == 40:
            assert work is not None and work.output_tokens_s == 100.0
    assert work is not None and work.output_tokens_s == 0.0


def test_prompts_that_wait_for_a_decode_node_wait_for_this_one_only_where_it_is_busy() -> None:
    for rate, queued in ((10_000.0, 500.0), (100.0, 2000.0)):
        loads = FleetLoads(Role.PREFILL)
        load = {
            "num_queued_tokens": 2000,
            "num_waiting": 1,
            "num_bootstrapping": 3,
            "prefill_tokens_per_s": rate,
        }
        loads.observe(0.0, [report("a", **load)])
        work = loads.observe(10.0, [report("a", **load)]).work
        assert work is not None and work.num_queued_tokens == queued


def test_nodes_that_do_not_count_prompts_tell_nothing() -> None:
    loads = FleetLoads(Role.PREFILL)
    loads.observe(0.0, [report("a")])
    assert loads.observe(10.0, [report("a", num_prompt_tokens=1000)]).work is None


# ---------------------------------------------------------------------------------------------- flags
def test_each_role_has_the_profile_of_its_nodes(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "prefill.json")
    slow_start = msgspec.structs.replace(PROFILE.node, start_s=70.0)
    msgspec.structs.replace(PROFILE, node=slow_start).save(tmp_path / "decode.json")
    plan = PlanOptions(plan_profile=tmp_path / "prefill.json", plan_decode_profile=tmp_path / "decode.json",
                       slo_ttft_ms=1000.0, slo_itl_ms=30.0)  # fmt: skip
    scaled = tuple(ScaledRole(role, 1, 2) for role in (Role.PREFILL, Role.DECODE))
    autoscalers = autoscalers_of(plan, AutoscaleOptions(autoscale=scaled), frozenset())
    assert [(one.role, one.pace.start_s) for one in autoscalers] == [
        (Role.PREFILL, 20.0),
        (Role.DECODE, 70.0),
    ]
    with pytest.raises(ConfigError, match="it needs --autoscale"):
        autoscalers_of(plan, AutoscaleOptions(), frozenset())
