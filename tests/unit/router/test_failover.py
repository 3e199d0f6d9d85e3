"""A sequence that loses its nodes goes on at others, and its client sees nothing but time."""

from __future__ import annotations

import itertools

import pytest

from router.dispatch.node import Loss
from router.dispatch.running_req import MAX_FAILURES, TRIAL_TOKENS, RunningReq
from shared.errors import RequestError
from shared.protocol.logprobs import LogprobParams, Logprobs
from shared.protocol.messages import (
    Cancel,
    Decode,
    Failed,
    Finish,
    NodeLimits,
    NodeRef,
    Prefill,
    ReqReport,
    Role,
    Stamp,
    TokenEntry,
)
from shared.timeline import FAILED_OVER
from tests.unit.router.dispatched import IDS, FakeNode, Fleet
from tests.unit.router.test_metrics import families


def tell(fleet: Fleet, req: RunningReq, position: int, *ids: int, finish: Finish | None = None) -> None:
    fleet.dispatcher.on_tokens(req.nodes[-1], [TokenEntry(req.key, position, ids, finish)])


def kill(fleet: Fleet, node: FakeNode, loss: Loss = Loss.CRASHED) -> None:
    (fleet.decodes if node.role is Role.DECODE else fleet.prefills).remove(node)
    fleet.dispatcher.on_node_lost(node, "connection closed", loss)


def counted(fleet: Fleet) -> dict[str, float]:
    """The failovers by cause, without those of which there were none."""
    counter = families(fleet.dispatcher._metrics.export().decode())["baton:num_failovers"]
    return {s.labels["cause"]: s.value for s in counter.samples if s.name.endswith("_total") and s.value}


def decode_of(req: RunningReq) -> FakeNode:
    node = req.nodes[-1]
    assert isinstance(node, FakeNode)
    return node


def start_on(fleet: Fleet, node: FakeNode) -> RunningReq:
    """A request that is sent to `node`, after some that may be sent to others."""
    started = (fleet.start() for _ in range(20))
    return next(req for req in started if node in req.nodes)


def latest(node: FakeNode, kind: type) -> object:
    return [message for message in node.sent if isinstance(message, kind)][-1]


class TestLostNodes:
    def test_a_stream_goes_on_behind_its_last_token(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        first = decode_of(req)
        tell(fleet, req, 0, 7, 8)
        assert req.take() == [7, 8]
        kill(fleet, first)
        second = decode_of(req)
        assert second is not first and req.key.attempt == 1
        prefill, decode = latest(fleet.prefills[0], Prefill), latest(second, Decode)
        assert isinstance(prefill, Prefill) and isinstance(decode, Decode)
        assert prefill.work == decode.work and prefill.work.output_ids == (7, 8)
        tell(fleet, req, 2, 9, finish=Finish("length"))
        assert req.take() == [9] and req.error is None
        assert fleet.view.seqs.of(second) == 0

    def test_the_other_node_lets_go(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        key = req.key
        kill(fleet, decode_of(req))
        assert Cancel(key) in fleet.prefills[0].sent

    def test_without_a_prefill_node_the_decode_node_prefills(self) -> None:
        fleet = Fleet(1)
        req = fleet.start()
        kill(fleet, fleet.prefills[0])
        message = latest(decode_of(req), Decode)
        assert isinstance(message, Decode) and message.prefill is None

    def test_after_the_decode_node_has_spoken_the_prefill_node_does_not_count(self) -> None:
        fleet = Fleet(1)
        req = fleet.start()
        tell(fleet, req, 0, 7)
        kill(fleet, fleet.prefills[0])
        assert req.key.attempt == 0

    def test_it_waits_for_a_node(self) -> None:
        fleet = Fleet(1)
        req = fleet.start()
        tell(fleet, req, 0, 7)
        kill(fleet, decode_of(req))
        assert req.nodes == () and not req.ended
        fleet.wait(5)
        fleet.decodes.append(FakeNode("d9", Role.DECODE))
        fleet.wait(0.3)
        assert decode_of(req) is fleet.decodes[0]

    @pytest.mark.parametrize("with_token", [False, True])
    def test_it_ends_with_the_reason_when_none_comes(self, with_token: bool) -> None:
        fleet = Fleet(1)
        req = fleet.start()
        if with_token:
            tell(fleet, req, 0, 7)
        kill(fleet, decode_of(req))
        fleet.wait(29.5)
        assert not req.ended
        fleet.wait(1)
        assert isinstance(req.error, RequestError) and (req.error.status, req.error.code) == (503, "no_node")
        assert "decode node d000 was lost: connection closed; no node could" in req.error.message
        assert fleet.dispatcher.num_running == 0

    def test_the_first_deadlines_hold(self) -> None:
        fleet = Fleet(1)
        req = fleet.start()
        kill(fleet, decode_of(req))
        before = fleet.dispatcher.seconds_left(req)
        fleet.wait(10)
        assert fleet.dispatcher.seconds_left(req) == before - 10
        fleet.dispatcher.expire(req)
        assert req.error is not None and "any node; decode node d000 was lost" in req.error.message
        fleet.decodes.append(FakeNode("d9", Role.DECODE))
        fleet.wait(1)
        assert not fleet.decodes[0].sent, "it has ended"

    def test_room_for_all_that_was_promised(self) -> None:
        fleet = Fleet(2)
        req = fleet.start(max_new_tokens=50)
        first = decode_of(req)
        (other,) = (node for node in fleet.decodes if node is not first)
        other.limits = NodeLimits(len(IDS) + 49, 65_536, 64)
        tell(fleet, req, 0, 7)
        kill(fleet, first)
        fleet.wait(1)
        assert req.nodes == ()
        other.limits = NodeLimits(len(IDS) + 50, 65_536, 64)
        fleet.wait(1)
        assert decode_of(req) is other

    def test_a_removed_nodes_sequences_go_elsewhere_when_its_time_is_up(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        tell(fleet, req, 0, 7)
        first, key = decode_of(req), req.key
        fleet.decodes.remove(first)
        assert fleet.dispatcher.fail_over_held(first, "its time is up") == 1
        assert decode_of(req) is fleet.decodes[0] and Cancel(key) in first.sent
        assert not req.failover.crashed and req.failover.num_failures == 0

    def test_logprobs_and_reports_of_all_attempts_count_once(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        prefill, first = fleet.prefills[0], decode_of(req)
        stamps = (Stamp("prefill", "queued", 1.0),)
        fleet.dispatcher.on_tokens(
            prefill, [TokenEntry(req.key, 0, (7,), report=ReqReport(cached_tokens=5, stamps=stamps))]
        )
        moved = ReqReport(cached_tokens=5, stamps=stamps, kv_pages_transferred=3)
        fleet.dispatcher.on_tokens(first, [TokenEntry(req.key, 0, (7,), report=moved)])
        kill(fleet, first)
        again = ReqReport(cached_tokens=80, kv_pages_transferred=4)
        fleet.dispatcher.on_tokens(req.nodes[-1], [TokenEntry(req.key, 1, (8,), report=again)])
        assert (req.cached_tokens, req.kv_pages_transferred) == (5, 7)
        assert [stamp.stage for stamp in req.stamps] == ["queued", FAILED_OVER]

    def test_input_logprobs_are_those_of_the_first_attempt(self) -> None:
        fleet = Fleet(2)
        req = fleet.start(logprobs=LogprobParams(start_len=len(IDS) - 2))
        first, one = decode_of(req), Logprobs(bytes(4))
        told = Logprobs(bytes(4))
        fleet.dispatcher.on_tokens(first, [TokenEntry(req.key, 0, (7,), None, None, one, told)])
        kill(fleet, first)
        other = TokenEntry(req.key, 1, (8,), None, None, one, Logprobs(b"\0\0\x80\xbf"))
        fleet.dispatcher.on_tokens(req.nodes[-1], [other])
        assert req.input_logprobs is told


class TestFailures:
    def test_a_failure_of_the_node_sends_it_elsewhere(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        first = decode_of(req)
        fleet.dispatcher.on_failed(first, Failed(req.key, 500, "the forward failed"))
        assert decode_of(req) is not first and not req.ended

    @pytest.mark.parametrize("failed", [(400, None), (500, "regex")])
    def test_a_failure_of_the_request_is_final(self, failed: tuple[int, str | None]) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        status, param = failed
        fleet.dispatcher.on_failed(decode_of(req), Failed(req.key, status, "no", param))
        assert req.error is not None and req.error.status == status

    def test_a_prefill_node_that_failed_is_not_asked_again(self) -> None:
        fleet = Fleet(1)
        req = fleet.start()
        fleet.dispatcher.on_failed(fleet.prefills[0], Failed(req.key, 503, "link lost"))
        message = latest(decode_of(req), Decode)
        assert isinstance(message, Decode) and message.prefill is None

    def test_a_lone_decode_node_is_asked_again_and_prefills(self) -> None:
        fleet = Fleet(1)
        req = fleet.start()
        fleet.dispatcher.on_failed(decode_of(req), Failed(req.key, 500, "the forward failed"))
        message = latest(decode_of(req), Decode)
        assert isinstance(message, Decode) and message.prefill is None and message.key.attempt == 1

    def test_a_blamed_peer_is_avoided_instead_of_the_node_that_says_so(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        first = decode_of(req)
        blames = fleet.prefills[0].ref.incarnation
        fleet.dispatcher.on_failed(first, Failed(req.key, 503, "wrong pages", blames=blames))
        assert req.failover.avoid == {blames}

    @pytest.mark.parametrize(("status", "num_on_bad"), [(503, 5), (500, 0)])
    def test_of_a_failed_transfer_only_the_blamed_node_is_avoided(self, status: int, num_on_bad: int) -> None:
        """With a 503 it may be the link, which counts against neither of the nodes when others are placed."""
        fleet = Fleet(2)
        (prefill,), bad = fleet.prefills, fleet.decodes[0]
        for _ in range(3):
            req = start_on(fleet, bad)
            failed = Failed(req.key, status, "link lost", blames=bad.ref.incarnation)
            fleet.dispatcher.on_failed(prefill, failed)
            assert req.nodes == (prefill, fleet.decodes[1])
            fleet.dispatcher.release(req)
        for node in fleet.decodes:
            while fleet.view.seqs.of(node):
                fleet.dispatcher.release(next(r for r in fleet.dispatcher._running.values() if r.needs(node)))
        assert fleet.burst(10)[bad.ref.node_id] == num_on_bad

    def test_what_a_draining_node_hands_back_is_no_failure(self) -> None:
        fleet = Fleet(1)
        fleet.prefills += [FakeNode(f"p{i}", Role.PREFILL) for i in range(1, 2 * MAX_FAILURES)]
        req = fleet.start()
        for _ in range(2 * MAX_FAILURES - 1):
            draining, *_ = req.nodes
            fleet.dispatcher.on_failed(
                draining, Failed(req.key, 503, "this node is draining", handed_back=True)
            )
            assert req.nodes, "sent at once"
            assert draining not in req.nodes
        assert req.failover.num_failures == 0

    def test_pauses_grow_and_failures_in_a_row_are_bounded(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        failed_at = []
        while not req.ended:
            failed_at.append(fleet.now)
            fleet.dispatcher.on_failed(decode_of(req), Failed(req.key, 500, "again"))
            while not req.ended and not req.nodes:
                fleet.wait(0.05)
        assert len(failed_at) == MAX_FAILURES + 1
        pauses = [b - a for a, b in itertools.pairwise(failed_at)]
        assert pauses == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6], abs=0.06)
        assert req.error is not None and req.error.message == "again"

    def test_a_new_token_ends_the_row(self) -> None:
        fleet = Fleet(2)
        req = fleet.start(max_new_tokens=50)
        for position in range(2 * MAX_FAILURES):
            tell(fleet, req, position, 7)
            fleet.dispatcher.on_failed(decode_of(req), Failed(req.key, 500, "again"))
            assert req.nodes, "sent at once"


class TestCircuitBreaker:
    def test_a_node_that_fails_often_is_left_out_for_a_while(self) -> None:
        fleet = Fleet(2)
        bad, good = fleet.decodes
        for _ in range(3):
            req = start_on(fleet, bad)
            fleet.dispatcher.on_failed(bad, Failed(req.key, 500, "again"))
        assert set(fleet.burst(10)) == {good.ref.node_id}
        fleet.wait(11)
        assert set(fleet.burst(10)) == {good.ref.node_id, bad.ref.node_id}

    def test_a_node_that_cannot_do_it_now_is_not_at_fault(self) -> None:
        fleet = Fleet(2)
        bad, good = fleet.decodes
        for _ in range(4):
            req = start_on(fleet, bad)
            fleet.dispatcher.on_failed(bad, Failed(req.key, 503, "it drains"))
        assert set(fleet.burst(10)) == {good.ref.node_id, bad.ref.node_id}

    def test_a_first_token_does_not_close_it(self) -> None:
        """A prefill node may send it before its pages arrive corrupt."""
        fleet = Fleet(2)
        fleet.prefills.append(FakeNode("p1", Role.PREFILL))
        bad = fleet.prefills[0]
        for _ in range(3):
            req = start_on(fleet, bad)
            fleet.dispatcher.on_tokens(bad, [TokenEntry(req.key, 0, (7,), report=ReqReport())])
            corrupt = Failed(req.key, 500, "corrupt", blames=bad.ref.incarnation)
            fleet.dispatcher.on_failed(decode_of(req), corrupt)
        assert all(fleet.start().nodes[0] is not bad for _ in range(10))

    @pytest.mark.parametrize("role", list(Role))
    def test_a_request_that_is_served_to_the_end_closes_it(self, role: Role) -> None:
        """A prefill node has served its part when the decode node speaks."""
        fleet = Fleet(2)
        fleet.prefills.append(FakeNode("p1", Role.PREFILL))
        bad = (fleet.decodes if role is Role.DECODE else fleet.prefills)[0]
        for _ in range(4):
            fleet.dispatcher.on_failed(bad, Failed(start_on(fleet, bad).key, 500, "again"))
            req = start_on(fleet, bad)
            tell(fleet, req, 0, 7, finish=Finish("length") if role is Role.DECODE else None)
        assert sum(bad in fleet.start().nodes for _ in range(10)) > 1

    def test_a_node_that_is_lost_again_and_again_gets_one_request_at_a_time(self) -> None:
        fleet = Fleet(2)
        for i in range(3):
            kill(fleet, fleet.decodes[0], Loss.BROKEN if i else Loss.CRASHED)
            again = FakeNode("d000", Role.DECODE)
            again.ref = NodeRef("d000", f"d000#{i + 2}", "nowhere")
            fleet.decodes.insert(0, again)
        assert fleet.burst(10)["d000"] == 0
        fleet.wait(11)
        assert fleet.burst(10)["d000"] == 1

    def test_a_node_that_leaves_is_not_at_fault(self) -> None:
        fleet = Fleet(2)
        for _ in range(3):
            kill(fleet, fleet.decodes[0], Loss.LEFT)
            fleet.decodes.insert(0, FakeNode("d000", Role.DECODE))
        assert fleet.burst(10)["d000"] == 5

    def test_the_only_node_is_asked_all_the_same(self) -> None:
        fleet = Fleet(1)
        for _ in range(4):
            req = fleet.start()
            fleet.dispatcher.on_failed(decode_of(req), Failed(req.key, 500, "again"))
        assert fleet.start().nodes


class TestFailoverCounter:
    def test_it_counts_attempts_that_were_sent(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        kill(fleet, decode_of(req))
        assert counted(fleet) == {"decode_node_lost": 1}
        kill(fleet, decode_of(req))
        fleet.wait(31)
        assert req.error is not None and req.error.code == "no_node"
        assert counted(fleet) == {"decode_node_lost": 1}

    def test_an_evicted_prefix_is_no_failover(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        fleet.dispatcher.on_not_cached(decode_of(req), req.key)
        assert req.key.attempt == 1 and req.nodes and not counted(fleet) and not req.stamps


class TestPoison:
    def suspects(self, fleet: Fleet, *reqs: RunningReq) -> None:
        """Crash the nodes of `reqs`, which are together on one, twice."""
        for _ in range(2):
            (node,) = {decode_of(req) for req in reqs}
            kill(fleet, node)
            fleet.wait(1)

    def two_suspects(self) -> tuple[Fleet, RunningReq, RunningReq]:
        """Of which one has a node."""
        fleet = Fleet(1)
        reqs = fleet.start(), fleet.start()
        for name in ("d1", "d2"):
            fleet.decodes.append(FakeNode(name, Role.DECODE))
            (old,) = {decode_of(req) for req in reqs}
            kill(fleet, old)
            fleet.wait(1)
        return fleet, *reqs

    def run_alone(self, fleet: Fleet, req: RunningReq) -> FakeNode:
        """Have the node of a suspect say that it holds nothing else."""
        fleet.dispatcher.on_runs_alone(decode_of(req), req.key)
        return decode_of(req)

    def test_a_crash_while_it_runs_alone_convicts(self) -> None:
        fleet = Fleet(3)
        req = fleet.start()
        self.suspects(fleet, req)
        message = latest(decode_of(req), Decode)
        assert isinstance(message, Decode) and message.prefill is None, "a suspect runs on one node"
        assert message.alone_tokens == TRIAL_TOKENS and not req.ended
        kill(fleet, self.run_alone(fleet, req))
        assert not req.ended and not req.nodes, "the process may be found again"
        fleet.decodes.append(FakeNode("d9", Role.DECODE))
        fleet.wait(4)
        assert req.error is not None and (req.error.status, req.error.code) == (500, "poison_request")

    def test_a_node_that_is_found_again_acquits_it(self) -> None:
        fleet = Fleet(3)
        req = fleet.start()
        self.suspects(fleet, req)
        node = self.run_alone(fleet, req)
        kill(fleet, node)
        fleet.decodes.append(node)
        fleet.dispatcher.on_node_alive(node)
        fleet.wait(4)
        assert req.nodes and not req.ended

    @pytest.mark.parametrize("has_gone_on", [False, True])
    def test_a_crash_that_a_peer_tells_first_counts_too(self, has_gone_on: bool) -> None:
        """As a failed transfer, so that the sequence is elsewhere when the node is lost."""
        fleet = Fleet(4, 0, num_prefill=3)
        req = fleet.start()
        for _ in range(2):
            prefill, decode = req.nodes
            assert isinstance(prefill, FakeNode) and isinstance(decode, FakeNode)
            failed = Failed(req.key, 503, "link lost", blames=prefill.ref.incarnation)
            fleet.dispatcher.on_failed(decode, failed)
            if has_gone_on:
                fleet.wait(1)
                tell(fleet, req, len(req.output_ids), 7)
            kill(fleet, prefill)
            fleet.wait(1)
        assert req.failover.is_suspect is not has_gone_on
        assert (req in fleet.dispatcher._suspicion.trials) is not has_gone_on

    def test_before_the_node_says_that_it_runs_alone_it_is_not_convicted(self) -> None:
        """The node may hold requests of other routers, and be waiting for them to leave."""
        fleet = Fleet(4)
        req = fleet.start()
        self.suspects(fleet, req)
        kill(fleet, decode_of(req))
        fleet.wait(4)
        assert req.nodes and not req.ended

    def test_in_a_busy_fleet_it_is_convicted_all_the_same(self) -> None:
        fleet = Fleet(10)
        others = [fleet.start(max_new_tokens=500) for _ in range(40)]
        poison = fleet.start()
        self.suspects(fleet, poison)
        trial = decode_of(poison)
        for other in [other for other in others if other.needs(trial)]:
            fleet.dispatcher.on_failed(trial, Failed(other.key, 503, "runs another", handed_back=True))
        kill(fleet, self.run_alone(fleet, poison))
        fleet.wait(4)
        assert poison.error is not None and poison.error.code == "poison_request"
        assert len(fleet.decodes) == 7 and all(other.nodes and not other.ended for other in others)

    def test_what_the_only_node_hands_back_is_sent_there_again_after_a_pause(self) -> None:
        fleet = Fleet(1)
        req = fleet.start()
        sent_at = []
        for _ in range(10):
            while not req.nodes:
                fleet.wait(0.05)
            sent_at.append(fleet.now)
            fleet.dispatcher.on_failed(decode_of(req), Failed(req.key, 503, "runs another", handed_back=True))
        assert not req.ended and fleet.now - sent_at[1] >= 8 * 0.2

    def test_many_neighbours_are_acquitted_in_time(self) -> None:
        fleet = Fleet(1)
        reqs = [fleet.start(max_new_tokens=500) for _ in range(64)]
        for name in ("d1", "d2"):
            fleet.decodes.append(FakeNode(name, Role.DECODE))
            kill(fleet, fleet.decodes[0])
            fleet.wait(1)
        fleet.decodes += [FakeNode(f"e{i}", Role.DECODE) for i in range(6)]
        fleet.wait(1)
        assert sum(bool(req.nodes) for req in reqs) == 3, "on half of the nodes, and each on one of its own"
        assert len({decode_of(req) for req in reqs if req.nodes}) == 3
        num_turns = 0
        while any(req.failover.is_suspect for req in reqs):
            for req in reqs:
                if req.nodes and req.failover.is_suspect:
                    tell(fleet, req, 0, *range(TRIAL_TOKENS))
            fleet.wait(1)  # a trial
            num_turns += 1
        assert num_turns < 30 and all(req.nodes and not req.ended for req in reqs)

    def test_neighbours_are_acquitted_one_after_the_other(self) -> None:
        fleet = Fleet(1)
        one, two = fleet.start(max_new_tokens=60), fleet.start(max_new_tokens=60)
        for name in ("d1", "d2"):
            fleet.decodes.append(FakeNode(name, Role.DECODE))
            (old,) = {decode_of(req) for req in (one, two)}
            tell(fleet, one, len(one.output_ids), 7)
            kill(fleet, old)
            fleet.wait(1)
        assert one.nodes and not two.nodes, "two waits until one has been tried"
        tell(fleet, one, 2, *range(16))
        fleet.wait(1)
        assert two.nodes and not one.failover.is_suspect
        kill(fleet, fleet.decodes[0])
        assert not one.ended, "it is no suspect any more"

    def test_other_work_goes_to_other_nodes(self) -> None:
        fleet = Fleet(4)
        req = fleet.start()
        self.suspects(fleet, req)
        trial = decode_of(req)
        assert set(fleet.burst(10)) == {node.ref.node_id for node in fleet.decodes if node is not trial}

    @pytest.mark.parametrize("crashed", [False, True])
    def test_silence_and_lost_connections_make_no_suspect(self, crashed: bool) -> None:
        fleet = Fleet(4)
        req = fleet.start()
        for _ in range(3):
            node = decode_of(req)
            kill(fleet, node, Loss.CRASHED if crashed else Loss.BROKEN)
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
        kill(fleet, decode_of(one))
        fleet.wait(29)
        assert not two.ended
        fleet.wait(2)
        assert two.error is not None and (two.error.status, two.error.code) == (503, "no_node")


class TestNumerics:
    def test_nodes_of_the_same_numerics_are_preferred(self) -> None:
        fleet = Fleet(4)
        req = fleet.start()
        first = decode_of(req)
        tell(fleet, req, 0, 7)
        others = [node for node in fleet.decodes if node is not first]
        others[0].numerics = others[1].numerics = "other"
        kill(fleet, first)
        assert decode_of(req) is others[2] and inexact(fleet) == 0

    def test_a_prefill_node_of_other_numerics_leaves_it_to_the_decode_node(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        tell(fleet, req, 0, 7)
        fleet.prefills[0].numerics = "other"
        kill(fleet, decode_of(req))
        message = latest(decode_of(req), Decode)
        assert isinstance(message, Decode) and message.prefill is None and inexact(fleet) == 0

    def test_without_such_nodes_it_goes_on_and_is_counted(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        tell(fleet, req, 0, 7)
        first = decode_of(req)
        (other,) = (node for node in fleet.decodes if node is not first)
        other.numerics = "other"
        kill(fleet, first)
        assert decode_of(req) is other and inexact(fleet) == 1

    def test_the_last_token_is_computed_with_the_same_numerics(self) -> None:
        fleet = Fleet(2)
        fleet.prefills.insert(0, FakeNode("p9", Role.PREFILL))
        req = fleet.start(max_new_tokens=3)
        first = req.nodes[0]
        (other,) = (node for node in fleet.prefills if node is not first)
        other.numerics = "other"
        tell(fleet, req, 0, 1, 2)
        kill(fleet, decode_of(req))
        assert req.nodes == (first,)
        first.numerics = "other"
        fleet.dispatcher.on_failed(first, Failed(req.key, 500, "again"))
        fleet.wait(0.2)
        assert req.nodes == (fleet.decodes[0],) and inexact(fleet) == 0

    def test_equal_numerics_that_are_not_exact_are_counted(self) -> None:
        """By the name of its numerics a node of torch is like another, yet a prefill there has other bits."""
        fleet = Fleet(2)
        for node in (*fleet.prefills, *fleet.decodes):
            node.is_exact = False
        req = fleet.start()
        fleet.decodes.append(FakeNode("late", Role.DECODE))
        kill(fleet, decode_of(req), Loss.BROKEN)
        assert inexact(fleet) == 0, "there was no output that it could part from"
        tell(fleet, req, 0, 7)
        kill(fleet, decode_of(req), Loss.BROKEN)
        assert inexact(fleet) == 1

    @pytest.mark.parametrize("role", list(Role))
    def test_one_node_that_is_not_exact_will_do(self, role: Role) -> None:
        fleet = Fleet(2, local_prefill_tokens=0)
        req = fleet.start()
        tell(fleet, req, 0, 7)
        first = decode_of(req)
        (other,) = (node for node in fleet.decodes if node is not first)
        (fleet.prefills[0] if role is Role.PREFILL else other).is_exact = False
        kill(fleet, first)
        assert req.nodes == (fleet.prefills[0], other) and inexact(fleet) == 1

    def test_a_move_computes_nothing_again(self) -> None:
        """Its pages are those of the source, so it is none of them, though the nodes are not exact."""
        fleet = Fleet(2)
        for node in (*fleet.prefills, *fleet.decodes):
            node.is_exact = False
        req = fleet.start()
        source = decode_of(req)
        fleet.dispatcher.on_tokens(source, [TokenEntry(req.key, 0, (7,))])
        fleet.dispatcher.move_held(source)
        assert req.moving is not None
        fleet.dispatcher.on_tokens(req.moving.nodes[0], [TokenEntry(req.moving.key, 1, (8,))])
        assert decode_of(req) is not source and req.output_ids == [7, 8] and inexact(fleet) == 0

    def test_a_suspect_is_tried_on_a_node_of_the_same_numerics(self) -> None:
        fleet = Fleet(5)
        req = fleet.start()
        tell(fleet, req, 0, 7)
        kill(fleet, decode_of(req))
        kill(fleet, decode_of(req))
        for node in fleet.decodes[:2]:
            node.numerics = "other"
        fleet.wait(1)
        assert req.failover.is_suspect and decode_of(req) is fleet.decodes[2]

    def test_before_the_first_token_any_node_will_do(self) -> None:
        fleet = Fleet(2)
        req = fleet.start()
        first = decode_of(req)
        (other,) = (node for node in fleet.decodes if node is not first)
        other.numerics = fleet.prefills[0].numerics = "other"
        kill(fleet, first)
        assert req.nodes == (fleet.prefills[0], other) and inexact(fleet) == 0


def inexact(fleet: Fleet) -> float:
    counter = families(fleet.dispatcher._metrics.export().decode())["baton:num_inexact_continuations"]
    return float(counter.samples[0].value)
