"""The routers that clients talk to, as real processes: two with the built-in model, one with scripted nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.model.files import BUILTIN_MODEL, resolve_model
from tests.clients.scripted import TEMPLATE
from tests.processes import NODE_FLAGS, Router
from tests.unit.router.fakes import write_model

KEY = "a-key-for-clients"
SCRIPTED_MODEL = "scripted"


@dataclass(frozen=True)
class Servers:
    """`open` splits prefill and decode, and asks for no key; `keyed` wants KEY and lets one request wait.

    The model of `scripted` calls tools.
    """

    open: Router
    keyed: Router
    scripted: Router

    def environment(self) -> dict[str, str]:
        """What scripts are told of them."""
        return {
            "BATON_URL": self.open.url,
            "BATON_KEYED_URL": self.keyed.url,
            "BATON_SCRIPTED_URL": self.scripted.url,
            "BATON_KEY": KEY,
            "BATON_MODEL": BUILTIN_MODEL,
            "BATON_MODEL_FOLDER": str(resolve_model(BUILTIN_MODEL)),
        }

    def check_clean(self) -> None:
        """Nothing that a client did is left: pages and slots are back, and the log tells of no bug."""
        self.open.wait_home()
        self.open.assert_clean_log()
        self.keyed.assert_clean_log()
        self.scripted.assert_clean_log()


@contextmanager
def running(folder: Path) -> Iterator[Servers]:
    """All of them, until the block ends."""
    one_at_a_time = ("--max-running-requests", "1", "--max-queued-requests", "1")
    with (
        Router(folder, *NODE_FLAGS) as served,
        Router(
            folder, "--local", "0P1D", "--api-key", KEY, *one_at_a_time, *NODE_FLAGS, name="keyed"
        ) as keyed,
        _scripted_nodes() as (prefill, decode),
        Router(
            folder,
            *(
                "--model",
                str(write_model(folder / "scripted-model", chat_template=TEMPLATE, context_length=16_384)),
            ),
            *("--served-model-name", SCRIPTED_MODEL, "--prefill", prefill, "--decode", decode),
            name="scripted",
        ) as scripted,
    ):
        for router in (served, keyed, scripted):
            router.wait_ready()
        yield Servers(served, keyed, scripted)


@contextmanager
def _scripted_nodes() -> Iterator[list[str]]:
    command = (sys.executable, "-m", "tests.clients.scripted")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()
        finally:
            process.kill()
