"""The fleet key is replaced in one half of the processes, then in the other: no stream is lost or changed."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.fault.slow_model import SlowModel
from tests.patience import until
from tests.processes import Call, Fleet, Process, Router, assert_gone, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

NUM_NEW = 30
STEPS = (("old", "new"), ("new", "old"), ("new",))
"""The keys of a process, its own first: docs/operating.md has the fleet go through these."""


def test_the_fleet_key_is_replaced_under_streams(slow_model: SlowModel, tmp_path: Path) -> None:
    """Two routers share the nodes, as they do where requests must not wait for a router to start.

    In each step, the half that was restarted and the one that was not work together, with either half first.
    """
    for name in ("old", "new"):
        (tmp_path / name).write_text(f"the {name} secret of the fleet")
    fleet = Fleet(
        tmp_path, slow_model.folder, "1P2D", flags=("--page-size", "4", "--max-total-tokens", "8192")
    )
    first, nodes = fleet.router, list(fleet.nodes.values())
    second = Router(tmp_path, *first.argv[first.argv.index("--prefill") :], name="router-2")
    processes = (*nodes, first, second)
    halves = [(second, first, [fleet.nodes["p0"], fleet.nodes["d0"]]), (first, second, [fleet.nodes["d1"]])]
    """A router and nodes that are restarted side by side, and the router that serves meanwhile."""
    bare = {process.name: process.argv for process in processes}
    streams: list[tuple[list[int], Call]] = []

    def give(process: Process, *keys: str) -> None:
        flags = [word for key in keys for word in ("--fleet-key", str(tmp_path / key))]
        process.argv = [*bare[process.name], *flags]

    def begin(router: Router) -> None:
        prompt = slow_model.fresh_prompt(40)
        streams.append((prompt, router.generate(prompt, NUM_NEW, stream=True)))
        streams[-1][1].wait_tokens(2)

    def all_ready() -> None:
        for router in (first, second):
            router.wait_ready(nodes=nodes)

    for process in processes:
        give(process, "old")
    with started(*processes):
        all_ready()
        for keys in STEPS:
            halves.reverse()
            for restarted, stays, half in halves:
                begin(restarted)
                begin(stays)
                restarted.send(signal.SIGTERM)
                until(partial(is_unready, restarted), "it is not ready")
                begin(stays)
                for node in half:
                    node.send(signal.SIGTERM)
                for process in (*half, restarted):
                    assert process.wait() == 0
                    assert_gone(process.family())
                    give(process, *keys)
                    process.start()
                all_ready()
        for prompt, call in streams:
            assert call.tokens() == slow_model.greedy(prompt, NUM_NEW)


def is_unready(router: Router) -> bool:
    """Whether it takes no new requests."""
    return router.get("/health")[0] in (0, 503)
