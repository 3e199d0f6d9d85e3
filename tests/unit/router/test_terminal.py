"""`router top` and `router generate` against a real router with scripted nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router import terminal
from router.http.config import HttpOptions
from router.terminal.client import KEY_VARIABLE, ClientError, RouterClient, printable
from shared.protocol.messages import Cancel, Decode, Failed, Load, Prefill
from tests.processes import free_port
from tests.unit.router.fakes import STORY, FakeNode, byte_level_tokenizer, joined_router, pair, write_model

ROOT = Path(__file__).resolve().parents[3]
KEYED = HttpOptions(port=0, served_model_name="tiny", api_keys=("secret",))
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def story(num_tokens: int) -> str:
    tokenizer = byte_level_tokenizer()
    return tokenizer.decode(tokenizer.encode(STORY).ids[:num_tokens])


async def command(*argv: str) -> int:
    """Its exit code; what it prints is captured by capsys."""
    return await asyncio.to_thread(terminal.run, argv[0], argv[1:])


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


# ----------------------------------------------------------------------------------------------- generate
@pytest.mark.parametrize("chat", [False, True])
def test_generate_streams_the_text(
    model_folder: Path, capsys: pytest.CaptureFixture[str], chat: bool
) -> None:
    async def run() -> None:
        async with pair() as (prefill, decode), joined_router(model_folder, [prefill, decode]) as (router, _):
            flags = ["--max-new-tokens", "15", "--temperature", "0", "--seed", "5", "--stop", "zebra"]
            if chat:
                flags += ["--chat", "--system", "be brief"]
            assert await command("generate", "tell me", "--url", router.url, *flags) == 0
            (sent,) = decode.all(Decode)
            assert (sent.work.params.max_new_tokens, sent.work.params.temperature, sent.work.params.seed) == (
                15,
                0,
                5,
            )
            prompt = "<|system|>be brief<|user|>tell me<|assistant|>" if chat else "tell me"
            assert list(sent.work.input_ids) == byte_level_tokenizer().encode(prompt).ids

    asyncio.run(run())
    assert not story(15).endswith("\n")
    assert capsys.readouterr().out == story(15) + "\n"


def test_generate_shows_where_the_time_went(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with pair() as nodes, joined_router(model_folder, list(nodes)) as (router, _):
            assert await command("generate", "a", "--url", router.url, "--timeline") == 0

    asyncio.run(run())
    shown = capsys.readouterr()
    assert "prefilling" not in shown.out
    for words in ("prefilling", "transferring", "decoding", "3 KV pages, 3,000 bytes moved"):
        assert words in shown.err


def test_generate_reads_a_prompt_from_standard_input(model_folder: Path) -> None:
    async def run() -> None:
        async with pair() as (prefill, decode), joined_router(model_folder, [prefill, decode]) as (router, _):
            pipe = asyncio.subprocess.PIPE
            flags = ["--url", router.url, "--max-new-tokens", "10"]
            process = await start("generate", "-", *flags, stdin=pipe, stdout=pipe, stderr=pipe)
            async with ended_after(process):
                out, err = await process.communicate("größer".encode())
                assert (process.returncode, err.decode()) == (0, "")
            assert out.decode() == story(10) + "\n"
            assert list(decode.all(Decode)[0].work.input_ids) == byte_level_tokenizer().encode("größer").ids

    asyncio.run(run())


def test_ctrl_c_aborts_the_request_on_its_nodes(model_folder: Path) -> None:
    async def first_then_nothing(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, node.story[:1])

    async def run() -> None:
        async with (
            pair(prefill=first_then_nothing, decode=first_then_nothing) as (prefill, decode),
            joined_router(model_folder, [prefill, decode]) as (router, _),
        ):
            pipe = asyncio.subprocess.PIPE
            process = await start("generate", "a", "--url", router.url, stdout=pipe, stderr=pipe)
            async with ended_after(process):
                assert process.stdout is not None
                assert await asyncio.wait_for(process.stdout.read(3), 20) == story(1).encode()
                process.send_signal(signal.SIGINT)
                _, err = await process.communicate()
                assert (process.returncode, err.decode()) == (130, "aborted\n")
            await decode.wait_for(Cancel)

    asyncio.run(run())


async def fail(node: FakeNode, message: Prefill | Decode) -> None:
    """A script."""
    node.send(Failed(message.key, 400, "the grammar is bad"))


async def fail_later(node: FakeNode, message: Prefill | Decode) -> None:
    """A script: the status has been sent when it fails."""
    node.tokens(message.key, 0, node.story[:1])
    await asyncio.sleep(0.2)
    node.send(Failed(message.key, 500, "the node is out of sorts"))


@pytest.mark.parametrize(
    ("script", "words"), [(fail, "the grammar is bad"), (fail_later, "the node is out of sorts")]
)
def test_generate_says_what_went_wrong(
    model_folder: Path, capsys: pytest.CaptureFixture[str], script: object, words: str
) -> None:
    async def run() -> None:
        async with (
            pair(prefill=script, decode=script) as nodes,
            joined_router(model_folder, list(nodes)) as (router, _),
        ):
            assert await command("generate", "a", "--url", router.url) == 1

    asyncio.run(run())
    assert capsys.readouterr().err == f"router generate: error: {words}\n"


def test_chat_without_a_template_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        folder = write_model(tmp_path, chat_template=None)
        async with pair() as nodes, joined_router(folder, list(nodes)) as (router, _):
            assert await command("generate", "a", "--chat", "--url", router.url) == 1

    asyncio.run(run())
    assert "chat template" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["generate", "top"])
def test_the_key_comes_from_the_environment(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    argv = [name, *(["a", "--max-new-tokens", "3"] if name == "generate" else [])]

    async def run() -> None:
        async with (
            pair() as nodes,
            joined_router(model_folder, list(nodes), http=KEYED, wait=False) as (router, _),
        ):
            async with asyncio.timeout(5):
                await router.ready()
            monkeypatch.delenv(KEY_VARIABLE, raising=False)
            assert await command(*argv, "--url", router.url) == 1
            assert "API key" in capsys.readouterr().err
            monkeypatch.setenv(KEY_VARIABLE, "secret")
            assert await command(*argv, "--url", router.url) == 0
            monkeypatch.setenv(KEY_VARIABLE, "wrong")
            assert await command(*argv, "--url", router.url, "--api-key", "secret") == 0

    asyncio.run(run())


@pytest.mark.parametrize("argv", [["generate", "a"], ["top", "--once"]], ids=["generate", "top"])
def test_nobody_answers(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert terminal.run(argv[0], [*argv[1:], "--url", url]) == 1
    assert (
        capsys.readouterr().err
        == f"router {argv[0]}: error: no router answers at {url}: Connection refused\n"
    )


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ClientError, match="not a URL"):
        RouterClient(url, None)


def test_a_key_that_no_header_carries() -> None:
    with pytest.raises(ClientError, match="API key"):
        RouterClient("localhost:8000", "schlüssel")


def test_models_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07c\n\tdé日") == "a�[2Jb��c\n\tdé日"


# ---------------------------------------------------------------------------------------------------- top
def test_top_prints_a_snapshot_into_a_pipe(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            decode.load = Load(
                num_running=3, num_pages=100, num_free_pages=50, num_evictable_pages=30, num_held_pages=20
            )
            async with joined_router(model_folder, [prefill, decode]) as (router, _):
                assert await command("top", "--url", router.url) == 0

    asyncio.run(run())
    shown = capsys.readouterr().out
    assert "\x1b" not in shown, "no colours in a pipe"
    lines = {line.split()[0]: line for line in shown.splitlines() if line.split()}
    assert "tiny" in lines["Baton"] and "ok" in lines["Baton"]
    assert "20/30/50" in lines["decode-0"] and "live" in lines["decode-0"]
    assert "live" in lines["prefill-0"]
    assert {"streaming", "waiting", "tokens/s", "first", "inter-token"} <= set(lines)


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
        async with asyncio.timeout(20):
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
                assert await asyncio.wait_for(process.wait(), 20) == 0

    asyncio.run(run())
