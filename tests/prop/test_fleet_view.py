"""What a router counts on its nodes, whatever becomes of its sequences: nothing is left when all have ended."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.dispatch.node import Loss
from router.dispatch.placement import POLICIES
from router.dispatch.running_req import Attempt, RunningReq
from shared.protocol.messages import Failed, Finish, Load, ReqReport, Role, TokenEntry
from tests.unit.router.dispatched import PAGE, SeenFleet, SeenNode

NUM_PAGES = 4096
picks = st.integers(0, 1 << 16)


class FleetViewMachine(RuleBasedStateMachine):
    """A router with nodes that say anything at any time, also of sequences that are not theirs."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), local=st.sampled_from([None, 0, 3 * PAGE]))
    def begin(self, policy: str, local: int | None) -> None:
        self.fleet = SeenFleet(3, local, num_prefill=2, prefill=policy, decode=policy)
        self.reqs: list[RunningReq] = []
        self.num_restarts = 0

    @property
    def nodes(self) -> list[SeenNode]:
        return [*self.fleet.prefills, *self.fleet.decodes]

    @property
    def running(self) -> list[RunningReq]:
        return [req for req in self.reqs if not req.ended]

    def one(self, pick: int) -> tuple[RunningReq, Attempt, SeenNode]:
        """A sequence that has not ended, an attempt at it, and a node."""
        req = self.running[pick % len(self.running)]
        attempts = [attempt for attempt in (*req.attempts, req.moving) if attempt is not None]
        attempt = attempts[-1 - pick // 7 % min(2, len(attempts))]
        nodes = attempt.nodes if attempt.nodes and pick % 5 else self.nodes
        node = nodes[pick // 3 % len(nodes)]
        assert isinstance(node, SeenNode)
        return req, attempt, node

    @rule(num_tokens=st.integers(1, 6 * PAGE), max_new=st.sampled_from([1, 2, 30]))
    def start(self, num_tokens: int, max_new: int) -> None:
        self.reqs.append(self.fleet.start(tuple(range(num_tokens)), max_new_tokens=max_new))

    @precondition(lambda self: self.running)
    @rule(
        pick=picks, count=st.integers(0, 4), ends=st.booleans(), reports=st.booleans(), gap=st.integers(0, 2)
    )
    def tokens(self, pick: int, count: int, ends: bool, reports: bool, gap: int) -> None:
        req, attempt, node = self.one(pick)
        entry = TokenEntry(
            attempt.key,
            max(0, len(req.output_ids) + gap - 1),
            (1,) * count,
            Finish("length") if ends else None,
            ReqReport() if reports else None,
        )
        self.fleet.dispatcher.on_tokens(node, [entry])

    @precondition(lambda self: self.running)
    @rule(pick=picks, more=st.booleans())
    def moves(self, pick: int, more: bool) -> None:
        """The decode node of a sequence gets on with it, and wants to be rid of it; its target may speak."""
        req = self.running[pick % len(self.running)]
        decodes = [node for node in req.nodes if node.role is Role.DECODE]
        for node in decodes:
            assert isinstance(node, SeenNode)
            self.fleet.dispatcher.on_tokens(node, [TokenEntry(req.key, len(req.output_ids), (1,))])
            self.fleet.dispatcher.on_move_wanted(node, [req.key])
        if more and req.moving is not None:
            entry = TokenEntry(req.moving.key, max(0, len(req.output_ids) - 1), (1, 1))
            self.fleet.dispatcher.on_tokens(req.moving.nodes[0], [entry])

    @precondition(lambda self: self.running)
    @rule(
        pick=picks, status=st.sampled_from([400, 500, 503]), handed_back=st.booleans(), blames=st.booleans()
    )
    def failed(self, pick: int, status: int, handed_back: bool, blames: bool) -> None:
        _, attempt, node = self.one(pick)
        blamed = attempt.nodes[0].ref.incarnation if blames and attempt.nodes else ""
        self.fleet.dispatcher.on_failed(
            node, Failed(attempt.key, status, "no", handed_back=handed_back, blames=blamed)
        )

    @precondition(lambda self: self.running)
    @rule(pick=picks, what=st.sampled_from(["not cached", "moved", "move wanted", "runs alone"]))
    def say(self, pick: int, what: str) -> None:
        dispatcher, (_, attempt, node) = self.fleet.dispatcher, self.one(pick)
        match what:
            case "not cached":
                dispatcher.on_not_cached(node, attempt.key)
            case "moved":
                dispatcher.on_moved(node, attempt.key)
            case "move wanted":
                dispatcher.on_move_wanted(node, [attempt.key])
            case _:
                dispatcher.on_runs_alone(node, attempt.key)

    @precondition(lambda self: self.running)
    @rule(pick=picks, how=st.sampled_from(["stop", "abort", "release", "expire"]))
    def end(self, pick: int, how: str) -> None:
        dispatcher, req = self.fleet.dispatcher, self.running[pick % len(self.running)]
        match how:
            case "stop":
                dispatcher.stop(req, 0)
            case "abort":
                dispatcher.abort(req, "enough")
            case "release":
                dispatcher.release(req)
            case _:
                dispatcher.expire(req)

    @rule(pick=picks, loss=st.sampled_from(Loss), comes_back=st.booleans())
    def lose(self, pick: int, loss: Loss, comes_back: bool) -> None:
        node = self.nodes[pick % len(self.nodes)]
        of_role = self.fleet.decodes if node.role is Role.DECODE else self.fleet.prefills
        of_role.remove(node)
        self.fleet.dispatcher.on_node_lost(node, "gone", loss)
        if comes_back or len(of_role) == 0:
            self.num_restarts += 1
            of_role.append(SeenNode(f"{node.ref.node_id}r{self.num_restarts}", node.role))
            self.fleet.dispatcher.on_node_alive(of_role[-1])

    @rule(pick=picks, drain=st.booleans())
    def drain(self, pick: int, drain: bool) -> None:
        node = self.nodes[pick % len(self.nodes)]
        if drain:
            self.fleet.dispatcher.fail_over_held(node, "drained")
        else:
            self.fleet.dispatcher.move_held(node)

    @rule(pick=picks, num_waiting=st.integers(0, 3))
    def pong(self, pick: int, num_waiting: int) -> None:
        self.nodes[pick % len(self.nodes)].load = Load(
            num_waiting=num_waiting, num_queued_tokens=num_waiting * PAGE, num_pages=NUM_PAGES
        )

    @rule(pick=picks, num_pages=st.integers(0, 6))
    def cache(self, pick: int, num_pages: int) -> None:
        self.nodes[pick % len(self.nodes)].holds(num_pages, range(6 * PAGE))

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.fleet.wait(seconds)

    @invariant()
    def counts_are_those_of_the_attempts(self) -> None:
        if not hasattr(self, "fleet"):
            return
        at_nodes = [a for req in self.running for a in (req.attempts[-1], req.moving) if a is not None]
        counts = self.fleet.view
        incarnations = {node.ref.incarnation for node in self.nodes}
        for amounts in (counts.seqs, counts.queued_tokens, counts.used_pages):
            assert set(amounts._own) <= incarnations, "a node that is gone is not forgotten"
        assert set(counts._places) <= incarnations
        for node in self.nodes:
            if node.role is Role.DECODE:
                there = counts._places.get(node.ref.incarnation, {})
                assert set(there) == {a.key for a in at_nodes if node in a.nodes}
            of = [a for a in at_nodes if node in a.nodes and (node.role is Role.DECODE or a.is_computing)]
            own = counts.seqs._own.get(node.ref.incarnation)
            assert (own.live if own else 0) == len(of)
            own = counts.used_pages._own.get(node.ref.incarnation)
            assert (own.live if own else 0) == sum(a.num_pages for a in of)
            own = counts.queued_tokens._own.get(node.ref.incarnation)
            first = [a for a in at_nodes if a.nodes[:1] == (node,) and a.is_computing]
            assert (own.live if own else 0) == sum(a.num_queued_tokens for a in first)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.dispatcher.close("the end")
            assert self.fleet.dispatcher.num_running == 0
            self.reqs.clear()
            self.counts_are_those_of_the_attempts()


FleetViewMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, phases=[Phase.explicit, Phase.generate]
)
TestFleetView = FleetViewMachine.TestCase


def test_an_entry_of_the_decode_node_counts_the_prefill_node_off_even_without_tokens() -> None:
    machine = FleetViewMachine()
    machine.begin("round-robin", 0)
    machine.start(6 * PAGE, 30)
    prefill, decode = machine.reqs[0].attempt.nodes
    machine.fleet.dispatcher.on_tokens(decode, [TokenEntry(machine.reqs[0].key, 0, ())])
    assert machine.fleet.view.seqs.of(prefill) == 0
    machine.counts_are_those_of_the_attempts()
    machine.teardown()
