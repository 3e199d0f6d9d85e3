"""A fleet goes over to the next version and to another key, process by process, while it serves."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest

from tests.fault.slow_model import SlowModel
from tests.patience import until
from tests.processes import Call, Fleet, Process, Router

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
NUM_NEW = 30
NEXT = """
    # Python imports this before everything else: the messages as the next version has them.
    import shared.protocol.messages as messages

    messages.PROTOCOL_VERSION += 1

    class Load(messages.Load, frozen=True):
        of_the_next: int = 7

    class Work(messages.Work, frozen=True):
        of_the_next: str = "new"

    class TokenEntry(messages.TokenEntry, frozen=True):
        of_the_next: tuple[int, ...] = (1, 2, 3)

    messages.Load, messages.Work, messages.TokenEntry = Load, Work, TokenEntry
"""


def test_every_process_is_replaced_under_streams(slow_model: SlowModel, tmp_path: Path) -> None:
    """Two routers share the nodes, as they do where requests must not wait for a router to start.

    Processes of the next version also have the keys of the fleet in another order: its key is being replaced.
    """
    keys = [str(tmp_path / name) for name in ("old", "new")]
    for key in keys:
        Path(key).write_text(f"the secret in {key}")
    has_keys = [word for key in keys for word in ("--fleet-key", key)]
    folder = tmp_path / "next"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(NEXT))
    streams: list[tuple[list[int], Call]] = []

    def begin(*routers: Router) -> None:
        for router in routers:
            prompt = slow_model.fresh_prompt(40)
            streams.append((prompt, router.generate(prompt, NUM_NEW, stream=True)))
            streams[-1][1].wait_tokens(2)

    def start_next(process: Process) -> None:
        process.environment = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        process.argv = [keys[1 - keys.index(word)] if word in keys else word for word in process.argv]
        process.start()

    flags = ("--page-size", "4", "--max-total-tokens", "4096", *has_keys)
    with Fleet(tmp_path, slow_model.folder, "1P2D", flags=flags, router_flags=has_keys) as fleet:
        old = fleet.router
        new = Router(tmp_path, *old.argv[old.argv.index("--prefill") :], name="router-2")
        try:
            begin(old)
            start_next(new)
            new.wait_ready(nodes=list(fleet.nodes.values()))
            for node in fleet.nodes.values():
                begin(old, new)
                assert node.stop() == 0
                start_next(node)
                for router in (old, new):
                    router.wait_ready(nodes=list(fleet.nodes.values()))
            begin(old, new)
            old.send(signal.SIGTERM)
            until(lambda: old.get("/health")[0] in (0, 503), "it is not ready")
            begin(new)
            assert old.wait() == 0
            start_next(old)
            fleet.wait_ready()
            begin(old, new)
            until(
                lambda: {load["of_the_next"] for load in new.loads().values()} == {7}, "all are of the next"
            )
            for prompt, call in streams:
                assert call.tokens() == slow_model.greedy(prompt, NUM_NEW)
            assert new.stop() == 0
            new.assert_clean_log()
        finally:
            new.close()
        fleet.stop()
