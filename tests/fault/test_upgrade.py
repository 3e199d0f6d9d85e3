"""A fleet goes over to the next version, process by process, while it serves: no stream is lost or changed."""

from __future__ import annotations

import os
import signal
import textwrap
from functools import partial
from pathlib import Path

import pytest

from shared.protocol.messages import PROTOCOL_VERSION
from tests.fault.slow_model import SlowModel
from tests.fault.test_fetches import FLAGS, ROUTER_FLAGS, Talk
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


BEFORE = """
    import functools
    import operator
    import typing

    import shared.protocol.messages as messages

    messages.PROTOCOL_VERSION -= 1
    known = [one for one in typing.get_args(messages.RouterToNode) if one is not messages.Lend]
    messages.RouterToNode = functools.reduce(operator.or_, known)
"""
AFTER_NEXT = """
    import shared.protocol.messages as messages

    messages.PROTOCOL_VERSION += 2
"""


def version_in(folder: Path, source: str) -> dict[str, str]:
    """The environment of a process of another version."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(source))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def test_every_process_is_replaced_under_streams(slow_model: SlowModel, tmp_path: Path) -> None:
    """Two routers share the nodes, as they do where requests must not wait for a router to start."""
    next_version = version_in(tmp_path / "next", NEXT)
    flags = ("--page-size", "4", "--max-total-tokens", "8192")
    streams: list[tuple[list[int], Call]] = []

    def begin(*routers: Router) -> None:
        for router in routers:
            prompt = slow_model.fresh_prompt(40)
            streams.append((prompt, router.generate(prompt, NUM_NEW, stream=True)))
            streams[-1][1].wait_tokens(2)

    with Fleet(tmp_path, slow_model.folder, "1P2D", flags=flags) as fleet:
        old = fleet.router
        new = Router(tmp_path, *old.argv[old.argv.index("--prefill") :], name="router-2")
        try:
            begin(old)
            _start_next(new, next_version)
            new.wait_ready(nodes=list(fleet.nodes.values()))
            for node in fleet.nodes.values():
                begin(old, new)
                assert node.stop() == 0
                _start_next(node, next_version)
                for router in (old, new):
                    router.wait_ready(nodes=list(fleet.nodes.values()))
            begin(old, new)
            old.send(signal.SIGTERM)
            until(lambda: old.get("/health")[0] in (0, 503), "it is not ready")
            begin(new)
            assert old.wait() == 0
            _start_next(old, next_version)
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


def test_nodes_that_do_not_know_a_message_are_not_sent_it(slow_model: SlowModel, tmp_path: Path) -> None:
    """Those of the version before lend nothing, so what would be fetched is computed."""
    version_before = version_in(tmp_path / "before", BEFORE)
    fleet = Fleet(tmp_path, slow_model.folder, "2P2D", flags=FLAGS, router_flags=ROUTER_FLAGS)
    for node in fleet.nodes.values():
        node.environment = version_before
    with fleet:
        for talk in (Talk(fleet, slow_model), Talk(fleet, slow_model)):
            for _ in range(3):
                talk.hear(talk.say())
        fleet.stop()
        assert not [node.name for node in fleet.nodes.values() if "message_ignored" in node.log]


def test_versions_too_far_apart_are_named(slow_model: SlowModel, tmp_path: Path) -> None:
    """A router beside a node, and two nodes of which a router of the version between them serves both."""
    ours, other = f"version {PROTOCOL_VERSION}", f"version {PROTOCOL_VERSION + 2}"
    fleet = Fleet(
        tmp_path, slow_model.folder, "1P1D", flags=("--page-size", "4", "--max-total-tokens", "512")
    )
    fleet.nodes["d0"].environment = version_in(tmp_path / "after_next", AFTER_NEXT)
    between = Router(tmp_path, *fleet.router.argv[fleet.router.argv.index("--prefill") :], name="between")
    between.environment = version_in(tmp_path / "next", NEXT)
    try:
        for process in (*fleet.processes, between):
            process.start()
        for router, refused in ((fleet.router, "router"), (between, "sending node")):
            words = f"the {refused} speaks {ours}, and this end {other},"
            until(partial(is_told, router, words), partial(router.get, "/health"))
        prompt = slow_model.fresh_prompt(40)
        assert between.generate(prompt, 2).tokens() == slow_model.greedy(prompt, 2)
        assert [process.stop() for process in (between, *fleet.processes)] == [0] * 4
        for process in (*fleet.processes, between):
            process.assert_clean_log()
    finally:
        between.close()
        fleet.close()


def is_told(router: Router, words: str) -> bool:
    """Whether /health answers with these words, and does not say ok."""
    _, health = router.get("/health")
    return health is not None and health["status"] != "ok" and words in health["reason"]


def _start_next(process: Process, next_version: dict[str, str]) -> None:
    process.environment = next_version
    process.start()
