"""`router top` against a real router with scripted nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.http.config import HttpOptions
from router.terminal.client import printable
from router.terminal.top import KEY_VARIABLE, main
from shared.protocol.messages import Load
from tests.patience import PATIENCE_S
from tests.processes import free_port
from tests.unit.router.fakes import joined_router, pair, until_sampled

ROOT = Path(__file__).resolve().parents[3]
KEYED = HttpOptions(port=0, served_model_name="tiny", api_keys=("secret",))
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


async def top(*argv: str) -> int:
    """Its exit code; what it prints is captured by capsys."""
    return await asyncio.to_thread(main, argv)


def start(*argv: str, **streams: int) -> asyncio.Future[asyncio.subprocess.Process]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    environment.pop(KEY_VARIABLE, None)
    starting = asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *argv, cwd=ROOT, env=environment, **streams
    )
    return asyncio.ensure_future(starting)


@contextlib.asynccontextmanager
async def ended_after(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_the_key_comes_from_the_environment(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    async def run() -> None:
        async with (
            pair() as nodes,
            joined_router(model_folder, list(nodes), http=KEYED, wait=False) as (router, _),
        ):
            await router.ready()
            monkeypatch.delenv(KEY_VARIABLE, raising=False)
            assert await top("--url", router.url) == 1
            assert "API key" in capsys.readouterr().err
            monkeypatch.setenv(KEY_VARIABLE, "secret")
            assert await top("--url", router.url) == 0
            monkeypatch.setenv(KEY_VARIABLE, "wrong")
            assert await top("--url", router.url, "--api-key", "secret") == 0

    asyncio.run(run())


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["--once", "--url", url]) == 1
    assert capsys.readouterr().err == f"router top: error: no router answers at {url}: Connection refused\n"


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_what_is_no_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--once", "--url", url]) == 1
    assert capsys.readouterr().err.startswith("router top: error: ")


def test_models_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07c\n\tdé日") == "a�[2Jb��c\n\tdé日"


def test_top_prints_a_snapshot_into_a_pipe(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            decode.load = Load(
                num_running=3, num_pages=100, num_free_pages=50, num_evictable_pages=30, num_held_pages=20
            )
            async with joined_router(model_folder, [prefill, decode]) as (router, client):
                await until_sampled(client)
                assert await top("--url", router.url) == 0

    asyncio.run(run())
    shown = capsys.readouterr().out
    assert "\x1b" not in shown, "no colours in a pipe"
    lines = {line.split()[0]: line for line in shown.splitlines() if line.split()}
    assert "tiny" in lines["Baton"] and "ok" in lines["Baton"]
    assert "20/30/50" in lines["decode-0"] and "live" in lines["decode-0"]
    assert "live" in lines["prefill-0"]
    assert {"streaming", "waiting", "tokens/s", "KV"} <= set(lines)


class Screen:
    """What a program in a terminal has written."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = ""
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, self._read)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    async def shows(self, *words: str) -> None:
        """Until all `words` have been written since the last call."""
        async with asyncio.timeout(PATIENCE_S):
            while not all(word in self._text for word in words):
                self._news.clear()
                await self._news.wait()
        self._text = ""

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        try:
            read = os.read(self._fd, 65536)
        except OSError:  # the program has closed its side
            asyncio.get_running_loop().remove_reader(self._fd)
            return
        self._text += _CONTROL.sub("", read.decode(errors="replace"))
        self._news.set()


def test_top_follows_the_fleet_and_outlives_the_router(model_folder: Path) -> None:
    async def run() -> None:
        http = HttpOptions(port=free_port(), served_model_name="tiny")
        master, slave = pty.openpty()
        async with contextlib.AsyncExitStack() as exits, pair() as (prefill, decode):
            screen = Screen(master)
            exits.callback(screen.close)
            async with joined_router(model_folder, [prefill, decode], http=http) as (router, _):
                process = await start("top", "--url", router.url, stdin=slave, stdout=slave, stderr=slave)
                os.close(slave)
                await exits.enter_async_context(ended_after(process))
                await screen.shows("prefill-0", "decode-0", "live")
                await decode.stop()
                await screen.shows("unavailable", "gone")
                decode.start(decode.port, incarnation="b")
                await screen.shows(" ok ", "decode-0")
            await screen.shows("trying again")
            async with joined_router(model_folder, [prefill, decode], http=http):
                await screen.shows(" ok ", "decode-0", "live")
                screen.type("xq")
                assert await process.wait() == 0

    asyncio.run(run())
