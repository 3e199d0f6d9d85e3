"""When the router has a prefill node fetch pages from another node, and from which."""

from __future__ import annotations

from typing import Any

import pytest

from router.dispatch.estimate import FETCH_S, FirstToken
from shared.protocol.messages import Failed, Lend, LinkReport, Load, Prefill, Role, TokenEntry, Work
from shared.protocol.sampling_params import SamplingParams
from tests.unit.router.dispatched import IDS, PAGE, SeenFleet, SeenNode

RATE = 1000.0
"""Prompt tokens a second: of IDS, 80 tokens, a page takes 16 ms. FETCH_S are 20 ms."""

FULL: dict[str, Any] = {"num_running": 64, "num_pages": 10, "reserve_wait_s": 60.0}
"""The load of a decode node that gets no requests."""


def linked(lender: SeenNode, *borrowers: SeenNode, **load: float) -> None:
    """The lender tells of links to these nodes."""
    links = tuple(LinkReport(node.ref.incarnation, False, "shm") for node in borrowers)
    lender.load = Load(prefill_tokens_per_s=RATE, links=links, **load)  # type: ignore[arg-type]


def fleet(num_prefill: int = 1) -> SeenFleet:
    """Of d000, which is full, and d001, which gets the requests. Short prompts are not computed there."""
    fleet = SeenFleet(2, 0, num_prefill=num_prefill, prefill="ttft", decode="ttft")
    for node in (*fleet.prefills, fleet.decodes[1]):
        linked(node)
    linked(fleet.decodes[0], *fleet.prefills, **FULL)
    return fleet


def lent(fleet: SeenFleet, to: int = 0) -> tuple[Prefill, list[Lend]]:
    """What one more request makes the router say: to the prefill node, and to lenders."""
    for node in (*fleet.prefills, *fleet.decodes):
        node.sent.clear()
    req = fleet.start()
    assert req.nodes == (fleet.prefills[to], fleet.decodes[1])
    (prefill,) = [message for message in fleet.prefills[to].sent if isinstance(message, Prefill)]
    nodes = (*fleet.prefills, *fleet.decodes)
    return prefill, [message for node in nodes for message in node.sent if isinstance(message, Lend)]


def test_what_another_node_holds_is_fetched_from_it() -> None:
    chosen = fleet()
    chosen.decodes[0].holds(4)
    prefill, (lend,) = lent(chosen)
    assert prefill.source is not None
    assert (prefill.source.node, prefill.source.num_pages) == (chosen.decodes[0].ref, 4)
    assert (lend.key, lend.borrower, lend.work) == (prefill.key, chosen.prefills[0].ref, prefill.work)
    assert lend in chosen.decodes[0].sent
    assert chosen.view.queued_tokens.of(chosen.prefills[0]) == len(IDS) - 4 * PAGE, "the rest is computed"


def test_the_next_attempt_fetches_by_the_tokens_that_have_come() -> None:
    chosen = fleet()
    chosen.decodes[0].holds(4)
    req = chosen.start()
    chosen.dispatcher.on_tokens(chosen.prefills[0], [TokenEntry(req.key, 0, (7,))])
    chosen.dispatcher.on_failed(chosen.decodes[1], Failed(req.key, 503, "busy"))
    chosen.wait(1)
    again = [message for message in chosen.decodes[0].sent if isinstance(message, Lend)][-1]
    assert again.key == req.key and again.work is not None and again.work.output_ids == (7,)


def test_a_first_token_comes_behind_the_fetch_and_the_queue_whichever_takes_longer() -> None:
    chosen = fleet()
    node, work = chosen.prefills[0], Work(IDS, SamplingParams())
    node.holds(1)
    chosen.decodes[0].holds(4)
    computed = FirstToken(0.0, (len(IDS) - PAGE) / RATE)
    linked(chosen.decodes[0], kv_bytes_per_s=3 * PAGE * 1024 / 0.01)
    assert chosen.estimates(work).first_token(node) == computed, "there is no link"
    linked(chosen.decodes[0], node, kv_bytes_per_s=3 * PAGE * 1024 / 0.01)
    fetch_s = pytest.approx(FETCH_S + 0.01)
    first = chosen.estimates(work).first_token(node)
    assert first is not None and (first.wait_s, first.compute_s) == (fetch_s, PAGE / RATE)
    linked(node, num_queued_tokens=100)
    assert chosen.estimates(work).first_token(node) == FirstToken(0.1, PAGE / RATE)


def test_without_a_link_one_is_asked_for_and_the_prompt_is_computed() -> None:
    chosen = fleet()
    chosen.decodes[0].holds(4)
    linked(chosen.decodes[0], **FULL)
    prefill, (lend,) = lent(chosen)
    assert prefill.source is None and lend.work is None and lend.borrower == chosen.prefills[0].ref
    assert chosen.view.queued_tokens.of(chosen.prefills[0]) == len(IDS)


def test_a_link_in_the_other_direction_is_none() -> None:
    chosen = fleet()
    chosen.decodes[0].holds(4)
    back = LinkReport(chosen.prefills[0].ref.incarnation, True, "shm")
    chosen.decodes[0].load = Load(links=(back,), **FULL)
    assert lent(chosen)[0].source is None


NOT_WORTH_IT = (
    "one page, slow lender, fast node, other numerics, older lender, older borrower, here already, no holder"
)


@pytest.mark.parametrize("why", NOT_WORTH_IT.split(", "))
def test_pages_that_are_not_worth_it_are_computed(why: str) -> None:
    chosen = fleet()
    prefill, holder = chosen.prefills[0], chosen.decodes[0]
    holder.holds(4)
    match why:
        case "one page":
            holder.holds(1)  # 16 ms to compute, 20 ms and more to fetch
        case "slow lender":
            linked(holder, prefill, kv_bytes_per_s=1024 * RATE, **FULL)
        case "fast node":
            linked(prefill)
            prefill.load = Load(prefill_tokens_per_s=4 * PAGE / FETCH_S)
        case "other numerics":
            holder.numerics = "torch"
        case "older lender":
            holder.version = Lend.since_version - 1
        case "older borrower":
            prefill.version = Lend.since_version - 1
        case "here already":
            prefill.holds(4)
        case "no holder":
            holder.holds(0)
    said, lends = lent(chosen)
    assert (said.source, lends) == (None, [])


def test_behind_a_queue_a_fetch_takes_no_time_of_its_own() -> None:
    """One page is not worth 20 ms, unless the node has other prompts to compute meanwhile."""
    chosen = fleet()
    chosen.decodes[0].holds(1)
    chosen.prefills[0].load = Load(prefill_tokens_per_s=RATE, num_queued_tokens=100)
    assert lent(chosen)[0].source is not None


def test_a_node_that_may_fetch_is_as_good_as_one_that_holds() -> None:
    """The node with the pages is busy: the other one has them sent over, and takes the request."""
    chosen = fleet(num_prefill=2)
    linked(chosen.prefills[0], chosen.prefills[1], num_queued_tokens=60)
    chosen.prefills[0].holds(4)  # 60 + 16 tokens there; on the other 20 ms and 16 tokens, or 80
    prefill, (lend,) = lent(chosen, to=1)
    assert prefill.source is not None and prefill.source.node == chosen.prefills[0].ref
    assert lend in chosen.prefills[0].sent


def test_the_lender_is_one_that_holds_most_and_has_a_link() -> None:
    chosen = fleet(num_prefill=2)
    chosen.prefills[0].load = Load(prefill_tokens_per_s=RATE, num_queued_tokens=500)
    chosen.prefills[0].holds(4)
    chosen.decodes[0].holds(3)
    prefill, _ = lent(chosen, to=1)
    assert prefill.source is not None and prefill.source.node == chosen.decodes[0].ref
    linked(chosen.prefills[0], chosen.prefills[1], num_queued_tokens=500)
    prefill, _ = lent(chosen, to=1)
    assert prefill.source is not None and prefill.source.node == chosen.prefills[0].ref


def test_of_those_that_hold_as_much_the_lender_is_the_one_with_fewer_sequences() -> None:
    chosen = fleet(num_prefill=2)
    linked(chosen.prefills[0], chosen.prefills[1], num_queued_tokens=500, num_waiting=5)
    for node in (chosen.prefills[0], chosen.decodes[0]):
        node.holds(4)
    prefill, _ = lent(chosen, to=1)
    assert prefill.source is not None and prefill.source.node == chosen.prefills[0].ref


def test_a_node_that_holds_no_more_is_no_lender() -> None:
    """Else its link would keep the router from asking for one to the node that does hold more."""
    chosen = fleet(num_prefill=2)
    chosen.prefills[0].load = Load(prefill_tokens_per_s=RATE, num_queued_tokens=500)
    chosen.prefills[0].holds(4)
    for node in (chosen.prefills[1], chosen.decodes[0]):
        node.holds(1)
    prefill, (lend,) = lent(chosen, to=1)
    assert prefill.source is None and lend in chosen.prefills[0].sent and lend.work is None


@pytest.mark.parametrize("most", range(1, 5))
def test_of_many_holders_those_of_most_pages_remain(most: int) -> None:
    """By halving: down to the last page, of which few nodes may have the KV."""
    chosen = SeenFleet(12)
    for i, node in enumerate(chosen.decodes):
        node.holds(min(1 + i, most))
    holders = chosen.estimates(Work(IDS, SamplingParams())).narrowed(1, chosen.decodes, 1)
    assert list(holders) == chosen.decodes[most - 1 :]


def test_a_decode_node_that_prefills_by_itself_fetches_nothing() -> None:
    chosen = fleet()
    chosen.decodes[0].holds(4)
    chosen.prefills.clear()
    assert chosen.start().nodes == (chosen.decodes[1],)
    assert not any(isinstance(message, Lend) for message in chosen.decodes[0].sent)
    assert chosen.live(Role.PREFILL) == []
