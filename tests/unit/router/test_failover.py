"""A sequence that loses its nodes goes on at others, and its client sees nothing but time."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from router.dispatch.node import Loss
from router.dispatch.running_req import MAX_FAILURES, TRIAL_TOKENS, RunningReq
from shared.protocol.logprobs import LogprobParams, Logprobs
from shared.protocol.messages import (
    Cancel,
    Decode,
    Finish,
    NodeLimits,
    NodeRef,
    Prefill,
    ReqKey,
    ReqReport,
    Role,
    Stamp,
    TokenEntry,
)
from shared.timeline import FAILED_OVER
from tests.unit.router.dispatched import IDS, SeenFleet, SeenNode, decode_of

LENGTH = Finish("length")


def counted(fleet: SeenFleet) -> dict[str, float]:
    """The failovers by cause, without those of which there were none."""
    samples = fleet.metric("baton:num_failovers").samples
    return {s.labels["cause"]: s.value for s in samples if s.name.endswith("_total") and s.value}


def inexact(fleet: SeenFleet) -> float:
    return fleet.figure("baton:num_inexact_continuations")


def ended_with(req: RunningReq) -> tuple[int, str | None]:
    assert req.error is not None
    return req.error.status, req.error.code


class TestTheNextAttempt:
    def test_a_stream_goes_on_behind_its_last_token(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start()
        first, key = decode_of(req), req.key
        fleet.tell(req, 7, 8, by=fleet.prefills[0])
        assert req.take() == [7, 8]
        fleet.kill(first)
        assert Cancel(key) in fleet.prefills[0].sent, "it lets go"
        second = decode_of(req)
        assert second is not first and req.key.attempt == 1
        prefill, decode = fleet.prefills[0].last(Prefill), second.last(Decode)
        assert prefill.key == decode.key == req.key
        assert prefill.work == decode.work == msgspec.structs.replace(req.work, output_ids=(7, 8))
        fleet.tell(req, 9, finish=LENGTH)
        assert (req.take(), req.output_ids, req.error) == ([9], [7, 8, 9], None)
        assert fleet.view.seqs.of(second) == 0

    def test_messages_of_the_earlier_attempt_are_dropped(self) -> None:
        fleet = SeenFleet(2)
        fleet.decodes[0].holds(4)
        req = fleet.start()
        first, old = decode_of(req), req.key
        fleet.tell(req, 10, 11)
        fleet.dispatcher.on_not_cached(first, old)
        assert req.key.attempt == 1 and req.nodes and not counted(fleet) and not req.stamps
        assert Cancel(old) not in first.sent, "it has let go by itself"
        fleet.tell(req, 5, 6, by=first, key=old, finish=LENGTH)
        fleet.tell(req, 5, 6, key=ReqKey("another router", old.rid, req.key.attempt), finish=LENGTH)
        fleet.fail(req, first, key=old)
        fleet.dispatcher.on_not_cached(first, old)
        assert (req.ended, req.key.attempt, req.output_ids) == (False, 1, [10, 11])

    @pytest.mark.parametrize("how", ["prefill node lost", "prefill node fails", "decode node fails"])
    def test_a_lone_decode_node_prefills(self, how: str) -> None:
        fleet = SeenFleet(1)
        req = fleet.start()
        match how:
            case "prefill node lost":
                fleet.kill(fleet.prefills[0])
            case "prefill node fails":
                fleet.fail(req, fleet.prefills[0], 503)
            case "decode node fails":
                fleet.fail(req, decode_of(req), 500)
        message = decode_of(req).last(Decode)
        assert message.prefill is None and message.key.attempt == 1

    @pytest.mark.parametrize("how", ["lost", "fails"])
    def test_after_the_decode_node_has_spoken_the_prefill_node_does_not_count(self, how: str) -> None:
        """The decode node has the pages."""
        fleet = SeenFleet(1)
        req = fleet.start()
        fleet.tell(req, 7)
        if how == "lost":
            fleet.kill(fleet.prefills[0])
        else:
            fleet.fail(req, fleet.prefills[0], 503)
        fleet.tell(req, 8, finish=LENGTH)
        assert (req.key.attempt, req.output_ids, req.error) == (0, [7, 8], None)

    def test_it_waits_for_a_node(self) -> None:
        fleet = SeenFleet(1)
        req = fleet.start()
        fleet.tell(req, 7)
        fleet.kill(decode_of(req))
        assert req.nodes == () and not req.ended
        fleet.wait(5)
        fleet.decodes.append(SeenNode("d9", Role.DECODE))
        fleet.wait(0.3)
        assert decode_of(req) is fleet.decodes[0]

    @pytest.mark.parametrize("with_token", [False, True])
    def test_it_ends_with_the_reason_when_none_comes(self, with_token: bool) -> None:
        fleet = SeenFleet(1)
        req = fleet.start()
        if with_token:
            fleet.tell(req, 7)
        fleet.kill(decode_of(req))
        fleet.wait(29.5)
        assert not req.ended
        fleet.wait(1)
        assert ended_with(req) == (503, "no_node") and fleet.dispatcher.num_running == 0
        assert req.error is not None and "d000" in req.error.message

    def test_the_first_deadlines_hold(self) -> None:
        fleet = SeenFleet(1)
        req = fleet.start()
        fleet.kill(decode_of(req))
        before = fleet.dispatcher.seconds_left(req)
        fleet.wait(10)
        assert fleet.dispatcher.seconds_left(req) == before - 10
        fleet.dispatcher.expire(req)
        assert req.error is not None and "d000" in req.error.message
        fleet.decodes.append(SeenNode("d9", Role.DECODE))
        fleet.wait(1)
        assert not fleet.decodes[0].sent, "it has ended"

    def test_room_for_all_that_was_promised(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start(max_new_tokens=50)
        first = decode_of(req)
        (other,) = (node for node in fleet.decodes if node is not first)
        other.limits = NodeLimits(len(IDS) + 49, 65_536, 64)
        fleet.tell(req, 7)
        fleet.kill(first)
        fleet.wait(1)
        assert req.nodes == ()
        other.limits = NodeLimits(len(IDS) + 50, 65_536, 64)
        fleet.wait(1)
        assert decode_of(req) is other

    def test_max_new_tokens_is_clipped_once(self) -> None:
        """A later attempt gets as many as the first was promised, though its nodes have room for more."""
        fleet = SeenFleet(1)
        (decode,) = fleet.decodes
        decode.holds(4)
        decode.limits = NodeLimits(len(IDS) + 6, len(IDS) + 6, 64)
        req = fleet.start(max_new_tokens=50, min_new_tokens=20)
        decode.limits = NodeLimits(65_536, 65_536, 64)
        fleet.dispatcher.on_not_cached(decode, req.key)
        first, second = (message for message in decode.sent if isinstance(message, Decode))
        assert first.work == second.work == req.work
        assert (first.work.params.max_new_tokens, first.work.params.min_new_tokens) == (6, 6)

    @pytest.mark.parametrize("held", [0, 5])
    def test_at_the_last_token_it_needs_no_decode_node(self, held: int) -> None:
        fleet = SeenFleet(1)
        (decode,) = fleet.decodes
        decode.holds(4)
        req = fleet.start(max_new_tokens=3)
        decode.holds(held)
        fleet.tell(req, 1, 2)
        fleet.dispatcher.on_not_cached(decode, req.key)
        message = fleet.prefills[0].last(Prefill)
        assert (message.decode, message.work.output_ids) == (None, (1, 2))
        assert req.nodes == tuple(fleet.prefills)
        assert Cancel(message.key) not in decode.sent, "it has said that it holds nothing"

    def test_a_removed_nodes_sequences_go_elsewhere_when_its_time_is_up(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start()
        fleet.tell(req, 7)
        first, key = decode_of(req), req.key
        fleet.decodes.remove(first)
        assert fleet.dispatcher.fail_over_held(first, "its time is up") == 1
        assert decode_of(req) is fleet.decodes[0] and Cancel(key) in first.sent
        assert not req.failover.crashed and req.failover.num_failures == 0

    def test_reports_of_all_attempts_count_once(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start()
        first, stamps = decode_of(req), (Stamp("prefill", "queued", 1.0),)
        fleet.tell(req, 7, by=fleet.prefills[0], report=ReqReport(cached_tokens=5, stamps=stamps))
        moved = ReqReport(cached_tokens=5, stamps=stamps, kv_pages_transferred=3)
        fleet.tell(req, 7, at=0, report=moved)
        fleet.kill(first)
        fleet.tell(req, 8, report=ReqReport(cached_tokens=80, kv_pages_transferred=4))
        assert (req.cached_tokens, req.kv_pages_transferred) == (5, 7)
        assert [stamp.stage for stamp in req.stamps] == ["queued", FAILED_OVER]

    def test_logprobs_of_the_prompt_come_once_and_those_of_tokens_from_both_attempts(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start(logprobs=LogprobParams(start_len=len(IDS) - 2))
        told, later = Logprobs(bytes(4)), Logprobs(b"\0\0\x80\xbf")  # -1.0
        fleet.tell(req, 7, logprobs=told, input_logprobs=told)
        fleet.kill(decode_of(req))
        fleet.tell(req, 8, logprobs=later, input_logprobs=later)
        assert req.input_logprobs is told
        assert [known.logprob for known in req.take_logprobs(0, 2)] == [0.0, -1.0]


def test_tokens_of_many_sequences_may_come_in_one_message() -> None:
    fleet = SeenFleet(1)
    reqs = [fleet.start() for _ in range(5)]
    entries = [TokenEntry(req.key, 0, (7 + at,), LENGTH) for at, req in enumerate(reqs)]
    fleet.dispatcher.on_tokens(fleet.decodes[0], entries)
    assert [req.output_ids for req in reqs] == [[7], [8], [9], [10], [11]]
    assert fleet.dispatcher.num_running == 0


class TestFailures:
    def test_a_failure_of_the_node_sends_it_elsewhere(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start()
        first = decode_of(req)
        fleet.fail(req, first)
        assert decode_of(req) is not first and not req.ended
        assert counted(fleet) == {"node_failed": 1}

    @pytest.mark.parametrize("failed", [(400, None), (500, "regex")])
    @pytest.mark.parametrize("at", [0, 1])
    def test_a_failure_of_the_request_is_final(self, at: int, failed: tuple[int, str | None]) -> None:
        fleet = SeenFleet(1)
        req = fleet.start()
        status, param = failed
        fleet.fail(req, fleet.nodes[at], status, param=param)
        assert ended_with(req)[0] == status
        assert [Cancel(req.key) in node.sent for node in fleet.nodes] == [at == 1, at == 0]

    def test_a_router_that_stops_ends_it_and_tells_the_nodes(self) -> None:
        fleet = SeenFleet(1)
        req = fleet.start()
        fleet.dispatcher.close("shutting down")
        assert ended_with(req)[0] == 503 and all(Cancel(req.key) in node.sent for node in fleet.nodes)

    def test_a_first_token_that_ends_it_cancels_the_decode_node(self) -> None:
        fleet = SeenFleet(1)
        req = fleet.start()
        fleet.tell(req, 0, by=fleet.prefills[0], finish=Finish("stop", 0))
        assert req.ended and req.output_ids == [0]
        assert [Cancel(req.key) in node.sent for node in fleet.nodes] == [False, True]

    def test_failovers_are_counted_when_they_are_sent(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start()
        for _ in range(2):  # to which the second has no node to go
            fleet.kill(decode_of(req))
            assert counted(fleet) == {"decode_node_lost": 1}
        fleet.wait(31)
        assert ended_with(req) == (503, "no_node")
        assert counted(fleet) == {"decode_node_lost": 1}

    def test_a_blamed_peer_is_avoided_instead_of_the_node_that_says_so(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start()
        blames = fleet.prefills[0].ref.incarnation
        fleet.fail(req, decode_of(req), 503, blames=blames)
        assert req.failover.avoid == {blames}

    @pytest.mark.parametrize(("status", "num_on_bad"), [(503, 5), (500, 0)])
    def test_of_a_failed_transfer_only_the_blamed_node_is_avoided(self, status: int, num_on_bad: int) -> None:
        """With a 503 it may be the link, which counts against neither of the nodes when others are placed."""
        fleet = SeenFleet(2)
        (prefill,), bad = fleet.prefills, fleet.decodes[0]
        for _ in range(3):
            req = fleet.start_on(bad)
            fleet.fail(req, prefill, status, blames=bad.ref.incarnation)
            assert req.nodes == (prefill, fleet.decodes[1])
            fleet.dispatcher.release(req)
        for req in list(fleet.dispatcher._running.values()):
            fleet.dispatcher.release(req)
        assert fleet.burst(10)[bad.ref.node_id] == num_on_bad

    def test_what_a_draining_node_hands_back_is_no_failure(self) -> None:
        fleet = SeenFleet(1, num_prefill=2 * MAX_FAILURES)
        req = fleet.start()
        for _ in range(2 * MAX_FAILURES - 1):
            draining, *_ = req.nodes
            fleet.fail(req, draining, 503, handed_back=True)
            assert req.nodes and draining not in req.nodes, "sent at once"
        assert req.failover.num_failures == 0

    def test_pauses_grow_and_failures_in_a_row_are_bounded(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start()
        failed_at = []
        while not req.ended:
            failed_at.append(fleet.now)
            fleet.fail(req, decode_of(req), message="again")
            while not req.ended and not req.nodes:
                fleet.wait(0.05)
        assert len(failed_at) == MAX_FAILURES + 1
        pauses = [b - a for a, b in itertools.pairwise(failed_at)]
        assert pauses == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6], abs=0.06)
        assert req.error is not None and req.error.message == "again"

    def test_a_new_token_ends_the_row(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start(max_new_tokens=50)
        for _ in range(2 * MAX_FAILURES):
            fleet.tell(req, 7)
            fleet.fail(req, decode_of(req))
            assert req.nodes, "sent at once"


class TestNodesThatFailAgainAndAgain:
    @pytest.mark.parametrize(("status", "is_at_fault"), [(500, True), (503, False)])
    def test_one_is_left_out_for_a_while(self, status: int, is_at_fault: bool) -> None:
        fleet = SeenFleet(2)
        bad = fleet.decodes[0]
        for _ in range(3):
            fleet.fail(fleet.start_on(bad), bad, status)
        assert (bad.ref.node_id in fleet.burst(10)) is not is_at_fault
        fleet.wait(11)
        assert len(fleet.burst(10)) == 2

    def test_a_first_token_does_not_bring_it_back(self) -> None:
        """A prefill node may send it before its pages arrive corrupt."""
        fleet = SeenFleet(2, num_prefill=2)
        bad = fleet.prefills[0]
        for _ in range(3):
            req = fleet.start_on(bad)
            fleet.tell(req, 7, by=bad, report=ReqReport())
            fleet.fail(req, decode_of(req), message="corrupt", blames=bad.ref.incarnation)
        assert all(fleet.start().nodes[0] is not bad for _ in range(10))

    @pytest.mark.parametrize("role", list(Role))
    def test_a_request_that_is_served_to_the_end_does(self, role: Role) -> None:
        """A prefill node has served its part when the decode node speaks."""
        fleet = SeenFleet(2, num_prefill=2)
        bad = (fleet.decodes if role is Role.DECODE else fleet.prefills)[0]
        for _ in range(4):
            fleet.fail(fleet.start_on(bad), bad)
            fleet.tell(fleet.start_on(bad), 7, finish=LENGTH if role is Role.DECODE else None)
        assert sum(bad in fleet.start().nodes for _ in range(10)) > 1

    @pytest.mark.parametrize(
        ("losses", "num_at_once"), [([Loss.CRASHED, Loss.BROKEN, Loss.BROKEN], 0), ([Loss.LEFT] * 3, 5)]
    )
    def test_one_that_is_lost_again_and_again_gets_one_request_at_a_time(
        self, losses: list[Loss], num_at_once: int
    ) -> None:
        fleet = SeenFleet(2)
        for number, loss in enumerate(losses, 2):
            fleet.kill(fleet.decodes[0], loss)
            again = SeenNode("d000", Role.DECODE)
            again.ref = NodeRef("d000", f"d000#{number}", "nowhere")
            fleet.decodes.insert(0, again)
        assert fleet.burst(10)["d000"] == num_at_once
        if not num_at_once:
            fleet.wait(11)
            assert fleet.burst(10)["d000"] == 1

    def test_the_only_node_is_asked_all_the_same(self) -> None:
        fleet = SeenFleet(1)
        for _ in range(4):
            req = fleet.start()
            fleet.fail(req, decode_of(req))
        assert fleet.start().nodes


class TestPoison:
    def crash_twice(self, fleet: SeenFleet, *reqs: RunningReq, comes: tuple[str, ...] = ()) -> None:
        """Crash the nodes of `reqs`, which are together on one, twice; before each crash a node may come."""
        for number in range(2):
            fleet.decodes += [SeenNode(name, Role.DECODE) for name in comes[number : number + 1]]
            (node,) = {decode_of(req) for req in reqs}
            fleet.kill(node)
            fleet.wait(1)

    def suspect(self, num_decode: int, **params: Any) -> tuple[SeenFleet, RunningReq]:
        """A fleet of which two nodes have crashed under a sequence, which is tried on one of the others."""
        fleet = SeenFleet(num_decode)
        req = fleet.start(**params)
        self.crash_twice(fleet, req)
        return fleet, req

    def two_suspects(self) -> tuple[SeenFleet, RunningReq, RunningReq]:
        """Of which one has a node."""
        fleet = SeenFleet(1)
        one, two = fleet.start(), fleet.start()
        self.crash_twice(fleet, one, two, comes=("d1", "d2"))
        return fleet, one, two

    def run_alone(self, fleet: SeenFleet, req: RunningReq) -> SeenNode:
        """Have the node of a suspect say that it holds nothing else."""
        fleet.dispatcher.on_runs_alone(decode_of(req), req.key)
        return decode_of(req)

    def test_a_crash_while_it_runs_alone_convicts(self) -> None:
        fleet, req = self.suspect(3)
        message = decode_of(req).last(Decode)
        assert message.prefill is None, "a suspect runs on one node"
        assert message.alone_tokens == TRIAL_TOKENS and not req.ended
        fleet.kill(self.run_alone(fleet, req))
        assert not req.ended and not req.nodes, "the process may be found again"
        fleet.decodes.append(SeenNode("d9", Role.DECODE))
        fleet.wait(4)
        assert ended_with(req) == (500, "poison_request")

    def test_a_node_that_is_found_again_acquits_it(self) -> None:
        fleet, req = self.suspect(3)
        node = self.run_alone(fleet, req)
        fleet.kill(node)
        fleet.decodes.append(node)
        fleet.dispatcher.on_node_alive(node)
        fleet.wait(4)
        assert req.nodes and not req.ended

    @pytest.mark.parametrize(("num_tokens", "is_suspect"), [(TRIAL_TOKENS - 1, True), (TRIAL_TOKENS, False)])
    def test_a_crash_is_forgotten_once_it_has_gone_on(self, num_tokens: int, is_suspect: bool) -> None:
        """A long stream outlives many nodes that crash for another reason."""
        fleet = SeenFleet(4)
        req = fleet.start(max_new_tokens=100)
        fleet.tell(req, 7, 7, 7)
        fleet.kill(decode_of(req))
        fleet.wait(1)
        fleet.tell(req, *[7] * num_tokens)
        fleet.kill(decode_of(req))
        assert req.failover.is_suspect is is_suspect

    @pytest.mark.parametrize("has_gone_on", [False, True])
    def test_a_crash_that_a_peer_tells_first_counts_too(self, has_gone_on: bool) -> None:
        """As a failed transfer, so that the sequence is elsewhere when the node is lost."""
        fleet = SeenFleet(4, 0, num_prefill=3)
        req = fleet.start()
        for _ in range(2):
            prefill, decode = req.nodes
            fleet.fail(req, decode, 503, blames=prefill.ref.incarnation)
            if has_gone_on:
                fleet.wait(1)
                fleet.tell(req, 7)
            fleet.kill(prefill)
            fleet.wait(1)
        assert req.failover.is_suspect is not has_gone_on
        assert (req in fleet.dispatcher._suspicion.trials) is not has_gone_on

    @pytest.mark.parametrize(
        ("loss", "is_suspect"), [(Loss.CRASHED, True), (Loss.BROKEN, False), (None, False)]
    )
    def test_a_second_one_is_waited_for(self, loss: Loss | None, is_suspect: bool) -> None:
        """The next nodes might crash under the sequence before the router sees that these have."""
        fleet = SeenFleet(4, 0, num_prefill=3)
        req = fleet.start()
        blamed = []
        for _ in range(2):
            prefill, decode = req.nodes
            blamed.append(prefill)
            fleet.fail(req, decode, 503, blames=prefill.ref.incarnation)
        fleet.wait(2.5)
        assert not req.nodes
        for node in blamed if loss is not None else ():
            fleet.kill(node, loss)
        fleet.wait(0.3 if loss is not None else 0.8)
        assert req.nodes and req.failover.is_suspect is is_suspect

    def test_before_the_node_says_that_it_runs_alone_it_is_not_convicted(self) -> None:
        """The node may hold requests of other routers, and be waiting for them to leave."""
        fleet, req = self.suspect(4)
        fleet.kill(decode_of(req))
        fleet.wait(4)
        assert req.nodes and not req.ended

    def test_in_a_busy_fleet_it_is_convicted_all_the_same(self) -> None:
        fleet = SeenFleet(10)
        others = [fleet.start(max_new_tokens=500) for _ in range(40)]
        poison = fleet.start()
        self.crash_twice(fleet, poison)
        trial = decode_of(poison)
        for other in [other for other in others if other.needs(trial)]:
            fleet.fail(other, trial, 503, handed_back=True)
        fleet.kill(self.run_alone(fleet, poison))
        fleet.wait(4)
        assert ended_with(poison) == (500, "poison_request")
        assert len(fleet.decodes) == 7 and all(other.nodes and not other.ended for other in others)

    def test_what_the_only_node_hands_back_is_sent_there_again_after_a_pause(self) -> None:
        fleet = SeenFleet(1)
        req = fleet.start()
        sent_at = []
        for _ in range(10):
            while not req.nodes:
                fleet.wait(0.05)
            sent_at.append(fleet.now)
            fleet.fail(req, decode_of(req), 503, handed_back=True)
        assert not req.ended and fleet.now - sent_at[1] >= 8 * 0.2

    def test_many_neighbours_are_acquitted_in_time(self) -> None:
        fleet = SeenFleet(1)
        reqs = [fleet.start(max_new_tokens=500) for _ in range(64)]
        self.crash_twice(fleet, *reqs, comes=("d1", "d2"))
        fleet.decodes += [SeenNode(f"e{i}", Role.DECODE) for i in range(6)]
        fleet.wait(1)
        on_trial = [decode_of(req) for req in reqs if req.nodes]
        assert len(on_trial) == len(set(on_trial)) == 3, "on half of the nodes, and each on one of its own"
        num_turns = 0
        while any(req.failover.is_suspect for req in reqs):
            for req in reqs:
                if req.nodes and req.failover.is_suspect:
                    fleet.tell(req, *range(TRIAL_TOKENS))
            fleet.wait(1)  # a trial
            num_turns += 1
        assert num_turns < 30 and all(req.nodes and not req.ended for req in reqs)

    def test_neighbours_are_acquitted_one_after_the_other(self) -> None:
        fleet = SeenFleet(1)
        one, two = fleet.start(max_new_tokens=60), fleet.start(max_new_tokens=60)
        for name in ("d1", "d2"):
            fleet.decodes.append(SeenNode(name, Role.DECODE))
            (old,) = {decode_of(req) for req in (one, two)}
            fleet.tell(one, 7)
            fleet.kill(old)
            fleet.wait(1)
        assert one.nodes and not two.nodes, "two waits until one has been tried"
        fleet.tell(one, *range(16))
        fleet.wait(1)
        assert two.nodes and not one.failover.is_suspect
        fleet.kill(fleet.decodes[0])
        assert not one.ended, "it is no suspect any more"

    def test_other_work_goes_to_other_nodes(self) -> None:
        fleet, req = self.suspect(4)
        trial = decode_of(req)
        assert set(fleet.burst(10)) == {node.ref.node_id for node in fleet.decodes if node is not trial}

    @pytest.mark.parametrize("crashed", [False, True])
    def test_silence_and_lost_connections_make_no_suspect(self, crashed: bool) -> None:
        fleet = SeenFleet(4)
        req = fleet.start()
        for _ in range(3):
            node = decode_of(req)
            fleet.kill(node, Loss.CRASHED if crashed else Loss.BROKEN)
            if crashed:  # but the same process answers again
                fleet.decodes.append(node)
                fleet.dispatcher.on_node_alive(node)
            fleet.wait(2)
        assert not req.failover.is_suspect and not req.ended

    def test_the_next_suspect_is_tried_when_one_is_released(self) -> None:
        fleet, one, two = self.two_suspects()
        assert one.nodes and not two.nodes
        fleet.dispatcher.release(one)
        fleet.wait(1)
        assert two.nodes

    def test_waiting_for_another_suspect_does_not_use_up_the_time_to_find_a_node(self) -> None:
        fleet, one, two = self.two_suspects()
        fleet.wait(50)
        assert not two.ended and not two.nodes
        fleet.kill(decode_of(one))
        fleet.wait(29)
        assert not two.ended
        fleet.wait(2)
        assert ended_with(two) == (503, "no_node")


class TestNumerics:
    """Tokens that were computed with some numerics go on with the same, where that can be."""

    @pytest.mark.parametrize(("num_decode", "num_others", "num_inexact"), [(4, 2, 0), (2, 1, 1)])
    def test_nodes_of_the_same_numerics_are_preferred(
        self, num_decode: int, num_others: int, num_inexact: int
    ) -> None:
        fleet = SeenFleet(num_decode)
        req = fleet.start()
        first = decode_of(req)
        fleet.tell(req, 7)
        others = [node for node in fleet.decodes if node is not first]
        for node in others[:num_others]:
            node.numerics = "other"
        fleet.kill(first)
        assert decode_of(req) is others[-1] and inexact(fleet) == num_inexact

    def test_a_prefill_node_of_other_numerics_leaves_it_to_the_decode_node(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start()
        fleet.tell(req, 7)
        fleet.prefills[0].numerics = "other"
        fleet.kill(decode_of(req))
        assert decode_of(req).last(Decode).prefill is None and inexact(fleet) == 0

    def test_before_the_first_token_any_node_will_do(self) -> None:
        fleet = SeenFleet(2)
        req = fleet.start()
        first = decode_of(req)
        (other,) = (node for node in fleet.decodes if node is not first)
        other.numerics = fleet.prefills[0].numerics = "other"
        fleet.kill(first)
        assert req.nodes == (fleet.prefills[0], other) and inexact(fleet) == 0

    def test_the_last_token_is_computed_with_the_same_numerics(self) -> None:
        fleet = SeenFleet(2)
        fleet.prefills.insert(0, SeenNode("p9", Role.PREFILL))
        req = fleet.start(max_new_tokens=3)
        first = req.nodes[0]
        assert isinstance(first, SeenNode)
        (other,) = (node for node in fleet.prefills if node is not first)
        other.numerics = "other"
        fleet.tell(req, 1, 2)
        fleet.kill(decode_of(req))
        assert req.nodes == (first,)
        first.numerics = "other"
        fleet.fail(req, first)
        fleet.wait(0.2)
        assert req.nodes == (fleet.decodes[0],) and inexact(fleet) == 0

    def test_equal_numerics_that_are_not_exact_are_counted(self) -> None:
        """By the name of its numerics a node of torch is like another, yet a prefill there has other bits."""
        fleet = SeenFleet(2)
        for node in fleet.nodes:
            node.is_exact = False
        req = fleet.start()
        fleet.decodes.append(SeenNode("late", Role.DECODE))
        fleet.kill(decode_of(req), Loss.BROKEN)
        assert inexact(fleet) == 0, "there was no output that it could part from"
        fleet.tell(req, 7)
        fleet.kill(decode_of(req), Loss.BROKEN)
        assert inexact(fleet) == 1

    @pytest.mark.parametrize("role", list(Role))
    def test_one_node_that_is_not_exact_will_do(self, role: Role) -> None:
        fleet = SeenFleet(2, local_prefill_tokens=0)
        req = fleet.start()
        fleet.tell(req, 7)
        first = decode_of(req)
        (other,) = (node for node in fleet.decodes if node is not first)
        (fleet.prefills[0] if role is Role.PREFILL else other).is_exact = False
        fleet.kill(first)
        assert req.nodes == (fleet.prefills[0], other) and inexact(fleet) == 1

    def test_a_move_computes_nothing_again(self) -> None:
        """Its pages are those of the source, so it is none of them, though the nodes are not exact."""
        fleet = SeenFleet(2)
        for node in fleet.nodes:
            node.is_exact = False
        req = fleet.start()
        source = decode_of(req)
        fleet.tell(req, 7)
        fleet.dispatcher.move_held(source)
        assert req.moving is not None
        fleet.tell(req, 8, by=req.moving.nodes[0], key=req.moving.key)
        assert decode_of(req) is not source and req.output_ids == [7, 8] and inexact(fleet) == 0

    def test_a_suspect_is_tried_on_a_node_of_the_same_numerics(self) -> None:
        fleet = SeenFleet(5)
        req = fleet.start()
        fleet.tell(req, 7)
        for _ in range(2):
            fleet.kill(decode_of(req))
        for node in fleet.decodes[:2]:
            node.numerics = "other"
        fleet.wait(1)
        assert req.failover.is_suspect and decode_of(req) is fleet.decodes[2]
