"""Pages that one node lends to another: the tokens stay the same, less is computed, and every page comes home.

The pages of these nodes hold the token ids themselves, so that a wrong page shows as a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from shared.kvcache.audit import audit_idle
from shared.kvtransfer.lending import (
    LINK_KEPT_S,
    MAX_BORROWERS,
    MAX_LOANS,
    PAGES_BESIDE_HANDOFFS,
    READY_S,
    Lending,
    loan_record,
)
from shared.kvtransfer.staging import Chunk
from shared.kvtransfer.states import READY_OVERDUE_S, Received
from shared.protocol.messages import Decode, Flush, Leaving, Lend, ReqKey
from shared.protocol.transfer_messages import CancelTransfer, Grant, Handoff
from tests.cluster import Cluster, Node, receiver_of, ref, sender_of
from tests.fake_network import VirtualClock
from tests.sim.test_moves import config, params, prompt
from tests.token_engine import reference_tokens, token_engine

PAGE = 4
LENDERS = {"p1": "p1", "d0": sender_of("d0")}
"""Nodes that lend to p0, and the parties by which they send."""
TURN = prompt(1, 160)
"""What the lender has computed, with an answer."""


@contextmanager
def fleet(
    num_prefill: int = 2, tokens: int = 4096, *, caches: bool = True, window: int | None = None
) -> Iterator[Cluster]:
    """p0 borrows. Every lender has a link to it. Without `caches`, prefill nodes keep no prefix."""
    make_engine = partial(token_engine, window=window)
    every = config(tokens=tokens)
    prefill = replace(every, cache=replace(every.cache, disable_radix_cache=not caches))
    with Cluster(num_prefill, 2, make_engine, prefill, decode_config=every) as cluster:
        for name in (*(f"p{i}" for i in range(1, num_prefill)), "d0", "d1"):
            cluster.router.outbox.send(name, Lend(ReqKey("router", "link"), ref(receiver_of("p0")), None))
        cluster.run(lambda: len(cluster.nodes["p0"].receiver.link_reports) == num_prefill + 1)
        yield cluster
        cluster.run_all()
        for _ in range(20):
            cluster.step()
        for node in cluster.live:
            assert not len(node.scheduler.lending), "every loan ends"
            assert node.vitals.load().leak == "", "each lent and fetched page has an owner"
        cluster.assert_idle()


def held(cluster: Cluster, lender: str, ids: Sequence[int]) -> list[int]:
    """Have `lender` compute `ids` and an answer; what it holds then."""
    nodes = (lender, "d1") if lender.startswith("p") else (None, lender)
    key = cluster.router.submit(f"{len(cluster.router.answers)} on {lender}", ids, params(9), *nodes)
    cluster.run(lambda: cluster.router.answers[key].ended)
    assert cluster.tokens(key) == reference_tokens(ids, 9, eos=None)
    return [*ids, *reference_tokens(ids, 9, eos=None)] if lender.startswith("d") else list(ids)


def fetched(cluster: Cluster) -> int:
    """How many tokens were lent to p0."""
    return cluster.nodes["p0"].vitals.num_fetched_tokens


def ask(
    cluster: Cluster,
    rid: str = "next",
    ids: Sequence[int] = TURN,
    lender: str = "p1",
    *,
    decode: str | None = "d1",
    num_new: int = 6,
    **options: Any,
) -> ReqKey:
    """Submit a request to p0, to which `lender` is to lend what it holds of it."""
    lender = LENDERS.get(lender, lender)
    return cluster.router.submit(rid, ids, params(num_new), "p0", decode, lender=lender, **options)


def ask_and_hold(cluster: Cluster, ids: Sequence[int] = TURN, lender: str = "p1") -> ReqKey:
    """A request whose fetch of TURN has begun. Pages of it come when the Grants are released."""
    held(cluster, lender, TURN)
    cluster.network.hold(Grant)
    key = ask(cluster, "first", ids, lender)
    cluster.run(lambda: cluster.network.num_held(Grant) == 1)
    return key


def all_cooling(node: Node) -> Callable[[], None]:
    """Have no page of `node` but such as a forward may still use. Returns what ends that forward."""
    allocator = node.engine.ledger.allocator
    taken = allocator.alloc(allocator.num_free) or []
    allocator.forward_launched()
    allocator.free(taken)
    return allocator.forward_retired


def check(cluster: Cluster, *asked: tuple[ReqKey, Sequence[int]]) -> None:
    """These requests have the tokens that any node would give them."""
    for key, ids in asked:
        cluster.run(lambda key=key: cluster.router.answers[key].ended, check=True)
        assert cluster.tokens(key) == reference_tokens(ids, 6, eos=None)


@pytest.mark.parametrize("lender", LENDERS)
def test_only_what_no_node_has_is_computed(lender: str) -> None:
    with fleet() as cluster:
        ids = [*held(cluster, lender, TURN), *prompt(2, 30)]
        key = ask(cluster, "next", ids, lender)
        check(cluster, (key, ids))
        num_held = (160 + (8 if lender == "d0" else 0)) // PAGE * PAGE
        assert fetched(cluster) == num_held
        report = cluster.router.answers[key].reports[0]
        assert report.cached_tokens == report.num_fetched_tokens == num_held and report.fetch_s > 0


def test_what_is_being_fetched_is_not_queued_to_be_computed() -> None:
    with fleet() as cluster:
        held(cluster, "p1", TURN)
        cluster.network.hold(Grant)
        key = ask(cluster)
        scheduler = cluster.nodes["p0"].scheduler
        cluster.run(lambda: cluster.network.num_held(Grant) == 1 and not len(scheduler.bootstrap_queue))
        assert scheduler.queued_tokens.total == 0
        cluster.network.release(Grant)
        check(cluster, (key, TURN))
        assert scheduler.queued_tokens.total == 0


def test_a_lender_that_hands_over_what_was_refused_ends_no_node() -> None:
    with fleet() as cluster:
        key = ReqKey("router", "never asked for")
        handoff = Handoff(key, 0, token_ids=(), kv_len=0, digest=0, cached_tokens=0, stamps=())
        refused = Received(key, "p1", handoff, nbytes=0, pages=0, seconds=0.0)
        assert cluster.nodes["p0"].scheduler.fetches.received(refused) == 0


def test_requests_with_the_same_beginning_share_a_fetch() -> None:
    with fleet() as cluster:
        held(cluster, "p1", TURN)
        asked = []
        for i in range(4):
            ids = [*TURN, *prompt(10 + i, 12)]
            asked.append((ask(cluster, f"r{i}", ids, num_lent_pages=40), ids))
        check(cluster, *asked)
        assert fetched(cluster) == 160
        assert cluster.network.num_sent["Handoff"] == 1 + 1 + 4, "of a loan, and of each request"


def test_a_fetch_of_a_few_pages_is_not_waited_for_by_a_request_that_wants_many() -> None:
    with fleet() as cluster:
        held(cluster, "p1", TURN)
        asked = [(ask(cluster, rid, num_lent_pages=pages), TURN) for rid, pages in (("few", 2), ("many", 39))]
        check(cluster, *asked)
        assert fetched(cluster) == (2 + 39) * PAGE


def test_the_first_of_those_that_share_a_fetch_may_leave() -> None:
    with fleet() as cluster:
        ids = [*TURN, *prompt(5, 12)]
        first, second = ask_and_hold(cluster, ids), ask(cluster, "second", ids)
        cluster.run(lambda: second in cluster.nodes["p0"].scheduler.fetches.awaited)
        cluster.router.give_up(first, "the client is gone")
        cluster.step()
        cluster.network.release(Grant)
        check(cluster, (second, ids))
        assert fetched(cluster) == 160


def test_a_fetch_that_is_not_wanted_any_more_is_given_up() -> None:
    with fleet() as cluster:
        key = ask_and_hold(cluster)
        cluster.router.give_up(key, "the client is gone")
        cluster.run(lambda: not len(cluster.nodes["p0"].scheduler.fetches))
        cluster.run(lambda: not len(cluster.nodes["p1"].scheduler.lending))
        cluster.network.release(Grant)
        assert fetched(cluster) == 0


@pytest.mark.parametrize(
    "what", ["evicted", "other tokens", "dies", "too slow", "corrupt", "no link", "full"]
)
def test_a_fetch_that_fails_gives_way_to_computing(what: str) -> None:
    with fleet(tokens=1024) as cluster:
        lender, holder = "p1", cluster.nodes["p1"]
        ids = [*held(cluster, "p1", TURN), *prompt(2, 30)]
        match what:
            case "evicted":
                holder.engine.ledger.flush()
            case "other tokens":
                ids = [*prompt(7, 8), *ids[8:]]
            case "too slow":
                cluster.network.delay(Handoff, 2.0)
            case "corrupt":
                cluster.network.corrupt_payloads()
            case "no link":
                lender = "gone"
            case "full":
                allocator = cluster.nodes["p0"].engine.ledger.allocator
                taken = allocator.alloc(allocator.num_free - 160 // PAGE) or []
        key = ask(cluster, "next", ids, lender)
        if what == "dies":
            cluster.run(lambda: len(holder.scheduler.lending) > 0)
            cluster.kill("p1")
        if what == "full":
            cluster.run(lambda: cluster.network.num_sent["CancelTransfer"] > 0)
            allocator.free(taken)
        check(cluster, (key, ids))
        assert fetched(cluster) == 0
        if what == "corrupt":
            assert holder.engine.ledger.radix_cache.peek(ids, len(ids)).num_pages == 0, "as it may be wrong"


def test_a_node_that_still_writes_a_page_of_a_fetch_is_not_idle() -> None:
    """Its only request ends while a page is written, which has its owner until then."""
    with fleet() as cluster:
        key, node = ask_and_hold(cluster), cluster.nodes["p0"]
        chunk = Chunk(first_page=0, num_pages=1, first_layer=0, num_layers=1)
        assert node.receiver.begin_scatter(key, chunk)
        cluster.router.give_up(key, "the client is gone")
        cluster.run(lambda: not node.scheduler.reqs)
        for _ in range(3):
            cluster.step()
        assert len(node.scheduler.fetches) == 1 and node.vitals.load().leak == ""
        node.receiver.end_scatter(key, chunk, 1)
        cluster.run(lambda: not len(node.scheduler.fetches))
        cluster.network.release(Grant)


def test_a_lender_locks_what_it_lends() -> None:
    with fleet() as cluster:
        key = ask_and_hold(cluster)
        lender = cluster.nodes["p1"]
        cluster.step()
        assert lender.vitals.load().leak == "" and lender.engine.ledger.count().protected == 40
        cluster.router.outbox.send("p1", Flush(1))
        cluster.run(lambda: 1 in cluster.router.answered)
        assert not cluster.router.answered[1], "for it is still there"
        cluster.network.release(Grant)
        check(cluster, (key, TURN))
        assert fetched(cluster) == 160 - PAGE
        cluster.router.outbox.send("p1", Flush(2))
        cluster.run(lambda: 2 in cluster.router.answered)
        assert cluster.router.answered[2] and not lender.engine.ledger.count().evictable


def test_a_lend_that_is_repeated_or_for_a_request_of_this_node_is_dropped() -> None:
    with fleet() as cluster:
        held(cluster, "p1", TURN)
        cluster.network.hold(Grant)
        key = ask(cluster)
        lend = Lend(key, ref(receiver_of("p0")), cluster.router._works[key])
        cluster.router.outbox.send("p1", lend)
        cluster.router.outbox.send("p0", lend)
        cluster.run(lambda: cluster.network.num_held(Grant) == 1)
        cluster.network.release(Grant)
        check(cluster, (key, TURN))
        assert fetched(cluster) == 160 - PAGE


@pytest.mark.parametrize("in_time", [True, False])
def test_pages_that_cool_are_waited_for_as_long_as_computing_would_take(in_time: bool) -> None:
    """A transfer writes beside the forwards, so it has no page that one of them may still use."""
    with fleet() as cluster:
        held(cluster, "p1", TURN)
        node = cluster.nodes["p0"]
        let_cool = all_cooling(node)
        key = ask(cluster)
        cluster.run(lambda: len(node.scheduler.fetches) == 1)
        for _ in range(5):
            cluster.step()
        assert len(node.scheduler.fetches) == 1
        if not in_time:
            cluster.run(lambda: not len(node.scheduler.fetches))
        let_cool()
        check(cluster, (key, TURN))
        assert fetched(cluster) == (160 - PAGE if in_time else 0)


def test_without_a_free_row_nothing_is_fetched() -> None:
    with fleet() as cluster:
        held(cluster, "p1", TURN)
        rows = cluster.nodes["p0"].engine.ledger.rows
        taken = [rows.alloc() for _ in range(rows.num_free)]
        key = ask(cluster)
        cluster.run(lambda: key in cluster.nodes["p0"].scheduler.reqs)
        assert not len(cluster.nodes["p0"].scheduler.fetches.awaited)
        for row in taken:
            rows.free(row)
        check(cluster, (key, TURN))


def test_a_fetch_takes_no_pages_before_a_prompt_that_came_first() -> None:
    """A large prompt would wait for as long as small fetches keep coming."""
    with fleet(tokens=400) as cluster:
        other, large = prompt(8, 160), prompt(9, 280)
        held(cluster, "p1", TURN)
        held(cluster, "p1", other)
        cluster.network.hold(Grant)
        submit, fetches = cluster.router.submit, cluster.nodes["p0"].scheduler.fetches
        first = ask(cluster, "first")
        cluster.run(lambda: len(fetches) == 1)
        waits = submit("large", large, params(1), "p0", None)
        cluster.run(lambda: cluster.nodes["p0"].scheduler.batcher.num_waiting == 1)
        cluster.step()
        second = ask(cluster, "second", other)
        cluster.run(lambda: second in cluster.nodes["p0"].scheduler.reqs)
        assert first in fetches.awaited and second not in fetches.awaited
        cluster.network.release(Grant)
        cluster.run(lambda: cluster.router.answers[waits].ended)
        assert cluster.tokens(waits) == reference_tokens(large, 1, eos=None)
        check(cluster, (first, TURN), (second, other))


def test_a_prompt_without_a_whole_page_waits_for_no_fetch() -> None:
    with fleet() as cluster:
        first, short = ask_and_hold(cluster), TURN[: PAGE - 1]
        second = ask(cluster, "second", short, decode=None, num_new=1)
        cluster.run(lambda: cluster.router.answers[second].ended)
        assert first in cluster.nodes["p0"].scheduler.fetches.awaited
        cluster.network.release(Grant)
        assert cluster.tokens(second) == reference_tokens(short, 1, eos=None)
        check(cluster, (first, TURN))


def test_a_node_without_a_cache_fetches_nothing() -> None:
    with fleet(caches=False) as cluster:
        ids = [*held(cluster, "d0", TURN), 5]
        check(cluster, (ask(cluster, "next", ids, "d0"), ids))
        (report,) = cluster.router.answers[ReqKey("router", "next")].reports[:1]
        assert fetched(cluster) == 0 and report.fetch_s == 0


def test_salted_prompts_share_no_pages() -> None:
    """Neither with what the lender has computed under another salt, nor with a fetch under way."""
    with fleet() as cluster:
        key = cluster.router.submit("on p1", TURN, params(6), "p1", "d1", extra_key="a")
        check(cluster, (key, TURN))
        cluster.network.hold(Grant)
        asked = [(ask(cluster, f"salt {salt}", extra_key=salt), TURN) for salt in ("a", "b", "")]
        for _ in range(10):
            cluster.step()
        assert len(cluster.nodes["p0"].scheduler.fetches) == 1
        cluster.network.release(Grant)
        check(cluster, *asked)
        assert fetched(cluster) == 160 - PAGE
        reports = [cluster.router.answers[one].reports[0] for one, _ in asked]
        assert [report.cached_tokens for report in reports] == [160 - PAGE, 0, 0]
        assert [report.num_fetched_tokens for report in reports] == [160 - PAGE, 0, 0]


@pytest.mark.parametrize("stopped", ["p0", "p1"])
def test_a_node_that_stops_during_a_fetch_keeps_no_page(stopped: str) -> None:
    with fleet() as cluster:
        key = ask_and_hold(cluster)
        engine = cluster.stop(stopped)
        audit_idle(engine.ledger)
        engine.close()
        cluster.network.release(Grant)
        if stopped == "p1":
            check(cluster, (key, TURN))
        else:
            cluster.run(lambda: cluster.router.answers[key].ended)
            assert cluster.router.answers[key].failures


def test_a_router_that_leaves_takes_its_fetches_along() -> None:
    with fleet() as cluster:
        key = ask_and_hold(cluster)
        for node in cluster.nodes:
            cluster.router.outbox.send(node, Leaving("the test says so"))
        cluster.router.give_up(key, "its router has left")
        cluster.run(lambda: not len(cluster.nodes["p1"].scheduler.lending))
        assert not len(cluster.nodes["p0"].scheduler.fetches.awaited)
        cluster.network.release(Grant)


@pytest.mark.parametrize("lender", LENDERS)
def test_a_lender_without_requests_is_not_idle(lender: str) -> None:
    """Its last request ends during a loan, whose pages would be a leak if the node were audited as idle."""
    with fleet() as cluster:
        key = ask_and_hold(cluster, lender=lender)
        nodes = (lender, None) if lender == "p1" else (None, lender)
        other = cluster.router.submit("other", prompt(6, 20), params(1), *nodes)
        cluster.run(lambda: cluster.router.answers[other].ended)
        for _ in range(3):
            cluster.step()
        cluster.network.release(Grant)
        check(cluster, (key, TURN))


def test_loans_are_bounded_in_number_and_in_time() -> None:
    """A borrower that never asks, as its router has called the request off, keeps no page of the lender for long."""
    with fleet() as cluster:
        held(cluster, "p1", TURN)
        lender, work = cluster.nodes["p1"], next(iter(cluster.router._works.values()))
        for i in range(MAX_LOANS + 5):
            message = Lend(ReqKey("router", f"never asked for {i}"), ref(receiver_of("p0")), work)
            cluster.router.outbox.send("p1", message)
        cluster.run(lambda: len(lender.scheduler.lending) > 0)
        cluster.step()
        assert len(lender.scheduler.lending) == MAX_LOANS
        began_at = cluster.network.clock()
        cluster.run(lambda: not len(lender.scheduler.lending))
        assert cluster.network.clock() - began_at < READY_S + 0.1


def test_pages_of_requests_go_first() -> None:
    """While a handoff leaves the lender, few lent pages are offered in a turn."""
    with fleet() as cluster:
        ids = prompt(4, 3 * PAGES_BESIDE_HANDOFFS * PAGE - 8)
        held(cluster, "p1", ids)
        cluster.network.hold(Handoff)
        busy = cluster.router.submit("busy", prompt(6, 20), params(6), "p1", "d1")
        cluster.run(lambda: cluster.network.num_held(Handoff) == 1)
        offers = cluster.network.num_sent["Offer"]
        key = ask(cluster, "next", [*ids, 5])
        scheduler = cluster.nodes["p1"].scheduler
        cluster.run(lambda: cluster.network.num_sent["Offer"] > offers)
        assert scheduler.step() and not scheduler.step(), "it does not sleep between its offers"
        cluster.run(lambda: cluster.network.num_held(Handoff) == 2)
        assert cluster.network.num_sent["Offer"] == offers + 3
        cluster.network.release(Handoff)
        check(cluster, (busy, prompt(6, 20)), (key, [*ids, 5]))


def test_a_loan_that_ends_half_offered_protects_no_window_page() -> None:
    with fleet(window=9) as cluster:
        ids = prompt(4, 3 * PAGES_BESIDE_HANDOFFS * PAGE)
        held(cluster, "p1", ids)
        cluster.network.hold(Handoff)
        cluster.router.submit("busy", prompt(6, 20), params(6), "p1", "d1")
        cluster.run(lambda: cluster.network.num_held(Handoff) == 1)
        offers, key = cluster.network.num_sent["Offer"], ask(cluster, ids=ids)
        lender = cluster.nodes["p1"]
        cluster.run(lambda: cluster.network.num_sent["Offer"] > offers)
        lender.sender.on_message(receiver_of("p0"), CancelTransfer(key, "the client is gone"))
        cluster.router.give_up(key, "the client is gone")
        cluster.run(lambda: not len(lender.scheduler.lending))
        assert cluster.network.num_held(Handoff) == 1, "that of the loan would follow its last page"
        cluster.network.release(Handoff)


def test_pages_that_come_to_a_lender_hold_up_no_loan() -> None:
    """A decode node that lends what its own next turn needs offers it at once: nothing of that request leaves it."""
    with fleet() as cluster:
        ids = held(cluster, "d0", prompt(4, 3 * PAGES_BESIDE_HANDOFFS * PAGE))
        offers = cluster.network.num_sent["Offer"]
        key = ask(cluster, "next", [*ids, 5], "d0", decode="d0")
        check(cluster, (key, [*ids, 5]))
        assert fetched(cluster) > 2 * PAGES_BESIDE_HANDOFFS * PAGE
        assert cluster.network.num_sent["Offer"] == offers + 2, "of the loan, and of what d0 lacks"


@pytest.mark.parametrize("lender", LENDERS)
def test_both_ends_count_the_bytes_of_a_loan(lender: str) -> None:
    """Routers estimate the next fetch by them."""
    with fleet() as cluster:
        held(cluster, lender, TURN)
        borrower, holder = cluster.nodes["p0"].vitals, cluster.nodes[lender].vitals
        before = holder.load().kv_bytes_transferred
        key = ask(cluster, "next", TURN, lender, decode=None, num_new=1)
        cluster.run(
            lambda: cluster.router.answers[key].ended and not len(cluster.nodes[lender].scheduler.lending)
        )
        cluster.step()
        assert borrower.load().kv_bytes_transferred == holder.load().kv_bytes_transferred - before > 0


def test_the_answer_so_far_is_lent_too() -> None:
    """A sequence that leaves a node that fails goes on behind its tokens."""
    with fleet() as cluster:
        answer = held(cluster, "d0", TURN)[len(TURN) :]
        key = ask(cluster, "next", TURN, "d0", num_new=12, output_ids=answer[:8])
        cluster.run(lambda: cluster.router.answers[key].ended)
        assert cluster.tokens(key) == reference_tokens(TURN, 12, eos=None)
        assert fetched(cluster) == 160 + 8 - PAGE


def test_pages_of_other_tokens_are_not_taken() -> None:
    """The lender says of which tokens its pages are."""
    with fleet() as cluster:
        held(cluster, "p1", TURN)
        cluster.network.hold(Handoff)
        key = ask(cluster)
        cluster.run(lambda: cluster.network.num_held(Handoff) == 1)
        message = cluster.network.take_held(Handoff)
        cluster.network.release(Handoff)
        ids = [*prompt(7, 8), *TURN[8:]]
        cluster.nodes["p1"].sender._outbox.send(receiver_of("p0"), loan_record(message.key, ids, 39, PAGE))
        check(cluster, (key, TURN))
        assert fetched(cluster) == 0


def test_a_fetch_that_was_given_up_is_not_shared() -> None:
    with fleet() as cluster:
        first = ask_and_hold(cluster)
        cluster.router.give_up(first, "the client is gone")
        second = ask(cluster, "second")
        cluster.run(lambda: second in cluster.nodes["p0"].scheduler.reqs)
        cluster.network.release(Grant)
        check(cluster, (second, TURN))
        assert fetched(cluster) == 160 - PAGE


def test_a_fetch_may_take_as_long_as_the_prompts_before_it_and_counts_behind_them() -> None:
    """The other prompt and this one wait for their decode node meanwhile."""
    with fleet() as cluster:
        held(cluster, "p1", TURN)
        node, other, ids = cluster.nodes["p0"], prompt(3, 300), [*TURN, *prompt(2, 30)]
        cluster.network.hold(Decode)
        busy = cluster.router.submit("busy", other, params(6), "p0", "d1")
        cluster.run(lambda: busy in node.scheduler.reqs)
        cluster.network.delay(Handoff, node.vitals.prefill_s(300))
        key = ask(cluster, "next", ids)
        cluster.run(lambda: len(node.scheduler.fetches) == 1)
        assert node.scheduler.queued_tokens.total == 300
        while len(node.scheduler.fetches):
            before = node.scheduler.queued_tokens.total
            cluster.step()
        assert fetched(cluster) == 160
        assert node.scheduler.queued_tokens.total > before, "30 more, and at most 16 were computed ahead"
        # Its pages came when Ready was overdue already: what it lacks is computed ahead, up to the last whole page.
        cluster.run(lambda: node.scheduler.queued_tokens.total == 4 + 2)
        cluster.network.release(Decode)
        check(cluster, (busy, other), (key, ids))


def test_what_is_being_fetched_is_not_computed_ahead() -> None:
    """Its Ready is overdue meanwhile, and nothing else waits."""
    with fleet() as cluster:
        node, common = cluster.nodes["p0"], prompt(1, 340)
        held(cluster, "p1", common)
        ids = [*common, *prompt(2, 30)]
        cluster.network.hold(Decode)
        cluster.network.delay(Handoff, 1.3 * READY_OVERDUE_S)
        assert node.vitals.prefill_s(len(common)) > 1.3 * READY_OVERDUE_S
        key = ask(cluster, "next", ids)
        cluster.run(lambda: fetched(cluster) > 0)
        assert node.vitals.num_ahead_tokens == 0
        cluster.run(lambda: node.vitals.num_ahead_tokens == 28)
        cluster.network.release(Decode)
        check(cluster, (key, ids))


@pytest.mark.parametrize("num_tokens", [150, 200])
def test_a_fetch_may_take_as_long_as_what_is_missing_takes_to_compute(num_tokens: int) -> None:
    """Of 240 tokens 80 are here."""
    with fleet() as cluster:
        common, node = prompt(3, 80), cluster.nodes["p0"]
        ids = [*common, *TURN]
        held(cluster, "p1", ids)
        first = cluster.router.submit("first", common, params(6), "p0", "d1")
        check(cluster, (first, common))
        cluster.network.delay(Handoff, node.vitals.prefill_s(num_tokens))
        key = ask(cluster, "next", ids, decode=None, num_new=1)
        cluster.run(lambda: cluster.router.answers[key].ended)
        assert fetched(cluster) == (160 - PAGE if num_tokens < 160 else 0)


def test_a_node_forgets_the_borrowers_that_asked_longest_ago() -> None:
    with fleet() as cluster:
        node, clock = cluster.nodes["d0"], VirtualClock()
        lending = Lending(node.engine.ledger, node.sender, node.peering, clock)
        for name in ("early", "again", *map(str, range(MAX_BORROWERS - 2)), "again", "last"):
            lending.start(Lend(ReqKey("router", "link"), ref(name), None))
            clock.now += LINK_KEPT_S
        assert not lending.is_borrower("early")
        assert lending.is_borrower("again") and lending.is_borrower("last")


def test_a_lender_that_cannot_reach_a_borrower_still_gets_its_handoffs() -> None:
    """What a decode node tells of its links decides where prompts go, and those come by another link."""
    with fleet() as cluster:
        node, borrower = cluster.nodes["d0"], receiver_of("p0")
        (link,) = (report.peer for report in node.sender.link_reports)
        assert link == borrower
        for wire in cluster.network.wires.values():
            wire.break_off("connection reset", but_not=borrower)
        cluster.run(lambda: borrower in node.sender.unreachable)
        cluster.step()
        assert borrower in node.sender.unreachable and borrower not in node.vitals.load().unreachable


@given(
    lengths=st.lists(st.integers(1, 90), min_size=4, max_size=12),
    tokens=st.integers(60, 300).map(lambda pages: PAGE * pages),
    window=st.sampled_from([None, 6, 30]),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_tokens_are_right_whoever_lends(
    lengths: list[int], tokens: int, window: int | None, seed: int
) -> None:
    """Conversations over three prefill nodes that all lend to each other, in small pools, some of them called off."""
    rng = random.Random(seed)
    with fleet(num_prefill=3, tokens=tokens, window=window) as cluster:
        asked: list[tuple[ReqKey, list[int]]] = []
        for i, length in enumerate(lengths):
            beginning = rng.choice(asked)[1] if asked and rng.random() < 0.7 else []
            ids = [*beginning, *prompt(seed + i, length)][: tokens // 3]
            lender = rng.choice(["p1", "p2", sender_of("d0"), sender_of("d1"), None])
            key = cluster.router.submit(
                f"r{i}",
                ids,
                params(6),
                rng.choice(["p0", "p0", "p1"]) if lender is None else "p0",
                rng.choice(["d0", "d1"]),
                lender=lender,
                num_lent_pages=rng.randint(1, 60),
            )
            asked.append((key, ids))
            for _ in range(rng.randint(0, 30)):
                cluster.step()
            if rng.random() < 0.1:
                cluster.router.give_up(key, "the client is gone")
        for key, ids in asked:
            cluster.run(lambda key=key: cluster.router.answers[key].ended, check=True)
            if not cluster.router.answers[key].failures:
                assert cluster.tokens(key) == reference_tokens(ids, 6, eos=None)
