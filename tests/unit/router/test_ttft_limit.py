"""--ttft-limit-s: which requests are refused since their first token would come too late."""

from __future__ import annotations

import re

import pytest

from router.dispatch.fleet_view import MAX_RETRY_AFTER_S
from router.dispatch.running_req import RunningReq
from shared.errors import RequestError
from shared.protocol.messages import Failed, Load, NodeLimits, TokenEntry
from tests.unit.router.dispatched import IDS, SeenFleet, SeenNode

LIMIT_S = 2.0
RATE = 100.0
"""Prompt tokens a second. IDS has 80."""


def limited(**load: float) -> SeenFleet:
    """One prefill node, which is as busy as `load` says, and one decode node."""
    fleet = SeenFleet(1, 0, ttft_limit_s=LIMIT_S)
    fleet.prefills[0].load = Load(prefill_tokens_per_s=RATE, **load)  # type: ignore[arg-type]
    return fleet


def refusal(fleet: SeenFleet) -> RequestError:
    nodes: list[SeenNode] = [*fleet.prefills, *fleet.decodes]
    num_sent = [len(node.sent) for node in nodes]
    with pytest.raises(RequestError) as caught:
        fleet.start()
    assert [len(node.sent) for node in nodes] == num_sent
    assert (caught.value.status, caught.value.code) == (429, "ttft_limit")
    return caught.value


def told_s(refused: RequestError) -> tuple[float, float]:
    """The seconds to the first token, and those of it that are a wait."""
    first, wait = re.findall(r"(\d+\.\d) s", refused.message)
    return float(first), float(wait)


def test_requests_are_taken_up_to_the_limit() -> None:
    fleet = limited()
    fleet.start()
    fleet.start()  # 160 tokens take 1.6 s
    error = refusal(fleet)
    assert told_s(error) == (2.4, 1.6) and "--ttft-limit-s" in error.message
    assert error.retry_after_s == 1 and fleet.figure("baton:num_late_requests") == 1
    assert len(fleet.prefills[0].sent) == len(fleet.decodes[0].sent) == 2


def test_an_estimate_from_priors_refuses_no_request() -> None:
    fleet = limited()
    fleet.prefills[0].load = Load(num_queued_tokens=1_000_000)
    fleet.start()


def test_the_rate_of_other_nodes_counts_while_a_node_has_none() -> None:
    fleet = limited()
    fleet.prefills[0].load = Load(num_queued_tokens=1_000_000)
    fleet.decodes[0].load = Load(prefill_tokens_per_s=RATE)
    assert refusal(fleet).retry_after_s == MAX_RETRY_AFTER_S


def test_a_prompt_that_waits_for_no_other_is_taken() -> None:
    limited().start(tuple(range(400)))


def test_what_the_node_holds_takes_no_time() -> None:
    fleet = limited(num_queued_tokens=150)
    fleet.prefills[0].holds(4)
    fleet.start()


def places(**load: int) -> SeenFleet:
    """A decode node with places for two sequences, and a prefill node that computes IDS in 0.1 s."""
    fleet = SeenFleet(1, 0, ttft_limit_s=LIMIT_S)
    fleet.prefills[0].load = Load(prefill_tokens_per_s=10 * len(IDS))
    fleet.decodes[0].limits = NodeLimits(65_536, 65_536, 2)
    fleet.decodes[0].load = Load(num_pages=1_000, num_free_pages=1_000, **load)
    return fleet


def begin(fleet: SeenFleet) -> RunningReq:
    """A request that has its first token."""
    req = fleet.start()
    fleet.dispatcher.on_tokens(fleet.prefills[0], [TokenEntry(req.key, 0, (1,))])
    return req


def test_a_request_waits_until_a_sequence_ends_on_a_full_decode_node() -> None:
    """Sequences stay for 4 s, and the next of the two that run ends in 3 s and then in 1 s."""
    fleet = places()
    for _ in range(2):
        ended = begin(fleet)
        fleet.wait(4)
        fleet.dispatcher.release(ended)
    begin(fleet)
    fleet.wait(1)
    begin(fleet)
    assert told_s(refusal(fleet)) == (3.1, 3.0)
    fleet.wait(2)
    fleet.start()
    # One more has a place when the other ends, in 2 s from now.
    assert told_s(refusal(fleet)) == (2.1, 2.0)


def test_before_a_sequence_has_ended_those_that_run_stay_as_long_again() -> None:
    fleet = places()
    begin(fleet)
    begin(fleet)
    fleet.wait(1)
    fleet.start()
    fleet.wait(2)
    assert told_s(refusal(fleet))[1] == 3.0


def test_a_sequence_that_has_just_begun_stays_as_long_as_the_oldest() -> None:
    fleet = places()
    begin(fleet)
    fleet.wait(3)
    begin(fleet)
    assert told_s(refusal(fleet))[1] == 3.0


def test_where_pages_are_short_as_many_sequences_have_places_as_the_node_runs() -> None:
    """By its rows it would have places for all."""
    fleet = places()
    fleet.decodes[0].limits = NodeLimits(65_536, 65_536, 64)
    begin(fleet)
    fleet.wait(3)
    fleet.start()
    fleet.decodes[0].load = Load(num_pages=8, num_running=1, num_bootstrapping=1)
    refusal(fleet)
    # Its Pong is older than the requests: 10 pages were sent to it, and 8 are there.
    fleet.decodes[0].load = Load(num_pages=8, num_held_pages=8)
    refusal(fleet)
    fleet.decodes[0].load = Load(num_pages=1_000, num_free_pages=990)
    fleet.start()


def test_sequences_of_other_routers_have_places() -> None:
    """They end one after the other: where sequences stay for 4.5 s, in 1.5 s and in 3 s."""
    fleet = places()
    ended = begin(fleet)
    fleet.wait(4.5)
    fleet.dispatcher.release(ended)
    fleet.dispatcher.release(fleet.start())  # without a token: it has had no place
    fleet.decodes[0].load = Load(num_pages=1_000, num_free_pages=1_000, num_running=2)
    fleet.start()
    assert told_s(refusal(fleet))[1] == 3.0


def test_sequences_that_wait_have_no_place_yet() -> None:
    """Two that were sent at once keep their places for 0.1 s of computing and 4.5 s."""
    fleet = places()
    ended = begin(fleet)
    fleet.wait(4.5)
    fleet.dispatcher.release(ended)
    fleet.start()
    fleet.start()
    assert told_s(refusal(fleet))[1] == 4.6


def test_another_attempt_is_not_refused() -> None:
    fleet = limited()
    req = fleet.start()
    fleet.prefills[0].load = Load(prefill_tokens_per_s=RATE, num_queued_tokens=1_000_000)
    fleet.dispatcher.on_failed(fleet.decodes[0], Failed(req.key, 503, "busy"))
    fleet.wait(10)
    assert not req.ended
    assert req.key.attempt > 0
    assert len(req.attempt.holders) > 0
