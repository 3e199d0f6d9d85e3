"""The two routers that clients talk to, as real processes with the built-in model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.model.files import BUILTIN_MODEL, resolve_model
from tests.processes import NODE_FLAGS, Router

KEY = "a-key-for-clients"


@dataclass(frozen=True)
class Servers:
    """`open` splits prefill and decode, and asks for no key; `keyed` wants KEY and lets one request wait."""

    open: Router
    keyed: Router

    def environment(self) -> dict[str, str]:
        """What scripts are told of them."""
        return {
            "BATON_URL": self.open.url,
            "BATON_KEYED_URL": self.keyed.url,
            "BATON_KEY": KEY,
            "BATON_MODEL": BUILTIN_MODEL,
            "BATON_MODEL_FOLDER": str(resolve_model(BUILTIN_MODEL)),
        }

    def check_clean(self) -> None:
        """Nothing that a client did is left: pages and slots are back, and the log tells of no bug."""
        self.open.wait_home()
        self.open.assert_clean_log()
        self.keyed.assert_clean_log()


@contextmanager
def running(folder: Path) -> Iterator[Servers]:
    """Both, until the block ends."""
    one_at_a_time = ("--max-running-requests", "1", "--max-queued-requests", "1")
    with (
        Router(folder, *NODE_FLAGS) as served,
        Router(
            folder, "--local", "0P1D", "--api-key", KEY, *one_at_a_time, *NODE_FLAGS, name="keyed"
        ) as keyed,
    ):
        served.wait_ready()
        keyed.wait_ready()
        yield Servers(served, keyed)
