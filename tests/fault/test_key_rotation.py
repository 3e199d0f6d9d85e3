"""The fleet key is replaced, process by process, while the fleet serves: no stream is lost or changed."""

from __future__ import annotations

import itertools
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.fault.slow_model import SlowModel
from tests.patience import until
from tests.processes import Call, Fleet, Process, Router

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

NUM_NEW = 30
STEPS = (("old", "new"), ("new", "old"), ("new",))
"""The keys of a process, its own first: docs/operating.md has the fleet go through these."""


def test_the_fleet_key_is_replaced_under_streams(slow_model: SlowModel, tmp_path: Path) -> None:
    """Two routers share the nodes, as they do where requests must not wait for a router to start."""
    for name in ("old", "new"):
        (tmp_path / name).write_text(f"the {name} secret of the fleet")
    fleet = Fleet(
        tmp_path, slow_model.folder, "1P2D", flags=("--page-size", "4", "--max-total-tokens", "8192")
    )
    first, nodes = fleet.router, list(fleet.nodes.values())
    second = Router(tmp_path, *first.argv[first.argv.index("--prefill") :], name="router-2")
    processes = (*nodes, first, second)
    bare = {process.name: process.argv for process in processes}
    streams: list[tuple[list[int], Call]] = []

    def start(process: Process, *keys: str) -> None:
        flags = [word for key in keys for word in ("--fleet-key", str(tmp_path / key))]
        process.argv = [*bare[process.name], *flags]
        process.start()

    def begin(router: Router) -> None:
        prompt = slow_model.fresh_prompt(40)
        streams.append((prompt, router.generate(prompt, NUM_NEW, stream=True)))
        streams[-1][1].wait_tokens(2)

    def all_ready() -> None:
        for router in (first, second):
            router.wait_ready(nodes=nodes)

    try:
        for process in processes:
            start(process, "old")
        all_ready()
        for keys in STEPS:
            for node, router in zip(nodes, itertools.cycle((first, second))):
                begin(router)
                assert node.stop() == 0
                start(node, *keys)
                all_ready()
            for router, other in ((first, second), (second, first)):
                begin(router)
                router.send(signal.SIGTERM)
                until(partial(is_unready, router), "it is not ready")
                begin(other)
                assert router.wait() == 0
                start(router, *keys)
                all_ready()
        for prompt, call in streams:
            assert call.tokens() == slow_model.greedy(prompt, NUM_NEW)
        assert [process.stop() for process in reversed(processes)] == [0] * len(processes)
        for process in processes:
            process.assert_clean_log()
    finally:
        for process in processes:
            process.close()


def is_unready(router: Router) -> bool:
    """Whether it takes no new requests."""
    return router.get("/health")[0] in (0, 503)
