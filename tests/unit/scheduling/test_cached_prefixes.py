"""The looked up prefixes of waiting requests are kept no longer than the requests."""

from __future__ import annotations

import gc

import pytest

from shared.scheduling.req import Req
from tests.prop.stepping import Stepping, new_req

PROMPT = list(range(100, 140))


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_ended_requests_are_forgotten_also_when_the_tree_does_not_change(policy: str) -> None:
    """The tree has prompt and output from the first request on, so that the others change nothing in it."""
    stepping = Stepping(schedule_policy=policy)
    for number in range(8):
        stepping.add(new_req(f"forgotten-{number}", PROMPT, 3))
        stepping.run()
    stepping.done.clear()
    gc.collect()
    alive = [o.key.rid for o in gc.get_objects() if type(o) is Req and "forgotten" in o.key.rid]
    assert len(alive) <= 1, f"{alive}: the last forward alone may still be known"
