"""Real processes: a request that waits for pages is told so, and its log lines are found on every process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import Fleet

pytestmark = pytest.mark.processes

FLAGS = ("--max-total-tokens", "512", "--log-level", "debug")
ROUTER_FLAGS = ("--log-level", "debug", "--log-requests")


def prompt(first: int) -> list[int]:
    """So long that two of them do not fit into a node."""
    return list(range(first, first + 300))


def test_waiting_for_pages(tmp_path: Path) -> None:
    with Fleet(tmp_path, "builtin", flags=FLAGS, router_flags=ROUTER_FLAGS) as fleet:
        router = fleet.router
        holds_pages = router.generate(prompt(20), 190, stream=True)
        holds_pages.wait_tokens(3)
        slow = router.generate(prompt(400), 4, return_timeline=True, rid="slow-one").finish()
        assert len(holds_pages.finish().token_ids) == 190
        told = slow.last["meta_info"]["first_token"]
        assert told["slow_because"] == "reservation", told
        waits = [stage for stage in told["stages"] if stage["stage"] == "reservation"]
        assert [stage["node"] for stage in waits] == ["d0"]
        fleet.stop()
        logs = [process.log for process in fleet.processes]
    lines = [line for log in logs for line in log.splitlines() if "rid=slow-one" in line]
    writers = {re.split(r"[\[\]]", line)[1].split("#")[0] for line in lines}
    assert writers == {"router-0", "p0", "d0"}, lines
    keys = {tuple(re.findall(r"\b(?:req|attempt|router)=\S+", line)) for line in lines}
    assert len({frozenset(key) for key in keys}) == 1, lines
    (request,) = [line for line in lines if " request " in line]
    assert "slow_because=reservation" in request
    for line in lines:
        assert "[router-0]" in line or re.search(r"\[[pd]0#\w+\]", line), "with its incarnation"
