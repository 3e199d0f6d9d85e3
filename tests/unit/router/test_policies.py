"""The policies of both fleets, over nodes whose pongs and caches the test decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from router.dispatch.estimate import PAUSE_COSTS, TOKENS_AHEAD
from router.dispatch.node import Node
from router.dispatch.placement import (
    MAX_COMPARED,
    compared,
    ttft,
)
from router.dispatch.running_req import Attempt
from shared.protocol.messages import Decode, Finish, Load, Prefill, ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from tests.unit.router.dispatched import IDS, PAGE, SeenFleet, SeenNode, decode_of

WORK = Work(IDS, SamplingParams(max_new_tokens=8))


def by_cost(num_prefill: int = 3, num_decode: int = 3, local: int | None = 0) -> SeenFleet:
    return SeenFleet(num_decode, local, num_prefill=num_prefill, prefill="ttft", decode="ttft")


def names(fleet: SeenFleet, role: Role, count: int, ids: tuple[int, ...] = IDS) -> list[str]:
    """The nodes of a role that get the next requests."""
    sent = [fleet.start(ids).nodes for _ in range(count)]
    return [node.ref.node_id for nodes in sent for node in nodes if node.role is role]


class TestPrefillNodes:
    """What `ttft` weighs there: the queue, the rate, and what a node holds."""

    def test_equal_nodes_take_turns(self) -> None:
        assert names(by_cost(), Role.PREFILL, 6) == ["p0", "p1", "p2"] * 2

    def test_a_queue_is_avoided_by_its_tokens(self) -> None:
        """One long prompt is more work than three short ones."""
        fleet = by_cost(2)
        fleet.prefills[0].load = Load(num_waiting=1, num_queued_tokens=40 * len(IDS))
        fleet.prefills[1].load = Load(num_waiting=3, num_queued_tokens=3 * len(IDS))
        assert names(fleet, Role.PREFILL, 30) == ["p1"] * 30

    def test_a_burst_between_two_pongs_is_shared(self) -> None:
        fleet = by_cost()
        assert set(Counter(names(fleet, Role.PREFILL, 90)).values()) == {30}

    def test_what_a_node_holds_need_not_be_computed(self) -> None:
        fleet = by_cost()
        fleet.prefills[1].holds(4)
        assert names(fleet, Role.PREFILL, 1) == ["p1"]

    def test_a_hot_prefix_is_copied_to_a_second_node_when_the_first_is_busy(self) -> None:
        fleet = by_cost(2)
        fleet.prefills[0].holds(4)
        assert Counter(names(fleet, Role.PREFILL, 12)) == {"p0": 10, "p1": 2}  # 16 tokens each there, else 80

    def test_a_fast_node_gets_more(self) -> None:
        fleet = by_cost(2)
        for node, rate in zip(fleet.prefills, (3000.0, 1000.0), strict=True):
            node.load = Load(prefill_tokens_per_s=rate)
        assert 28 <= Counter(names(fleet, Role.PREFILL, 40))["p0"] <= 32

    def test_a_node_that_has_measured_nothing_is_as_fast_as_the_median_of_the_others(self) -> None:
        fleet = by_cost(4, 1)
        for node, rate in zip(fleet.prefills, (100.0, 200.0, 900.0), strict=False):
            node.load = Load(prefill_tokens_per_s=rate)
        assert fleet.estimates(WORK).prefill_s(fleet.prefills[3]) == len(IDS) / 200.0

    @pytest.mark.parametrize("last", ["p0", "p1"])
    def test_those_about_as_good_as_the_best_take_turns(self, last: str) -> None:
        """Another router sees the same loads, and must not choose the same node each time."""
        fleet = by_cost(3, 1)
        for node, rate in zip(fleet.prefills, (1000.0, 1050.0, 800.0), strict=True):
            node.load = Load(prefill_tokens_per_s=rate)
        fleet.view.last[Role.PREFILL] = last
        chosen = ttft(fleet.estimates(WORK), fleet.prefills)
        assert {chosen.ref.node_id, last} == {"p0", "p1"}

    def test_a_prompt_leaves_the_queue_when_its_first_token_comes(self) -> None:
        fleet = by_cost(1)
        node = fleet.prefills[0]
        reqs = [fleet.start() for _ in range(3)]
        assert fleet.view.queued_tokens.of(node) == 3 * len(IDS)
        fleet.tell(reqs[0], 1, by=node)
        assert (fleet.view.queued_tokens.of(node), fleet.view.seqs.of(node)) == (2 * len(IDS), 2)
        fleet.tell(reqs[0], 1, 2, at=0, finish=Finish("length"))
        fleet.dispatcher.release(reqs[1])
        assert (fleet.view.queued_tokens.of(node), fleet.view.seqs.of(node)) == (len(IDS), 1)
        node.load = Load(num_queued_tokens=7 * len(IDS), num_waiting=7)  # six of other routers
        assert fleet.view.queued_tokens.of(node) == 7 * len(IDS)
        fleet.dispatcher.release(reqs[2])
        assert fleet.view.queued_tokens.of(node) == 6 * len(IDS)


class TestDecodeNodes:
    """What `ttft` weighs there: places, pages, and what a node holds."""

    def test_equal_nodes_take_turns(self) -> None:
        assert names(by_cost(), Role.DECODE, 6) == ["d000", "d001", "d002"] * 2

    def test_a_node_that_has_just_joined_gets_no_more_than_the_others_have(self) -> None:
        fleet = by_cost(1, 3)
        for node in fleet.decodes[:2]:
            node.load = Load(num_running=20, num_pages=4096, num_free_pages=4096)
        fleet.decodes[2].load = Load(num_pages=4096, num_free_pages=4096)
        assert names(fleet, Role.DECODE, 15) == ["d002"] * 15
        later = Counter(names(fleet, Role.DECODE, 45))
        assert all(32 <= later[name] + had <= 34 for name, had in (("d000", 20), ("d001", 20), ("d002", 15)))

    def test_a_held_prefix_draws_until_places_cost_more(self) -> None:
        fleet = by_cost(1, 2, local=None)
        fleet.prefills[0].load = Load(prefill_tokens_per_s=100.0)
        for node in fleet.decodes:
            node.load = Load(
                num_pages=4096, num_free_pages=4096, gen_throughput=1000.0, prefill_tokens_per_s=100.0
            )
        fleet.decodes[0].holds(4)
        got = names(fleet, Role.DECODE, 4)
        assert got[0] == "d000" and "d001" in got

    def test_a_slow_network_is_avoided(self) -> None:
        fleet = by_cost(1, 2)
        for node, seconds in zip(fleet.decodes, (10.0, 0.001), strict=True):
            node.load = Load(kv_bytes_per_s=100_000 / seconds)
        assert names(fleet, Role.DECODE, 5) == ["d001"] * 5

    def test_without_prefill_nodes_the_holder_of_the_prefix_computes(self) -> None:
        fleet = by_cost(1, 3)
        fleet.prefills.clear()
        fleet.decodes[1].holds(4)
        assert names(fleet, Role.DECODE, 1) == ["d001"]

    def test_a_full_node_is_the_last_choice(self) -> None:
        fleet = by_cost(1, 2)
        full, roomy = fleet.decodes
        full.load = Load(num_running=4, num_pages=100, num_free_pages=2, gen_throughput=100.0)
        roomy.load = Load(num_running=7, num_pages=100, num_free_pages=90, gen_throughput=100.0)
        assert names(fleet, Role.DECODE, 1) == ["d001"]
        full.load = Load(
            num_running=4, num_pages=100, num_free_pages=0, num_evictable_pages=90, gen_throughput=100.0
        )
        assert names(fleet, Role.DECODE, 1) == ["d000"]

    def test_the_one_that_waits_for_pages_longest_is_the_last_of_the_full(self) -> None:
        fleet = by_cost(1, 2)
        for node, wait in zip(fleet.decodes, (9.0, 1.0), strict=True):
            node.load = Load(num_running=4, num_pages=8, reserve_wait_s=wait)
        assert names(fleet, Role.DECODE, 1) == ["d001"]

    def test_a_node_that_is_to_compute_by_itself_is_judged_by_how_long_it_takes(self) -> None:
        """With a fixed limit it does so even where a prefill node would be faster."""
        fleet = by_cost(1, 2, local=PAGE)
        fleet.decodes[0].holds(4)
        fleet.decodes[0].load = Load(prefill_tokens_per_s=1.0)
        fleet.prefills[0].load = fleet.decodes[1].load = Load(prefill_tokens_per_s=1000.0)
        assert names(fleet, Role.DECODE, 1) == ["d001"]


class TestLargeFleets:
    """`ttft` compares some of their nodes, so that a choice costs the router no more with 1,000 than with 100."""

    IDS = tuple(range(100 * PAGE))

    def compared(self, fleet: SeenFleet) -> Sequence[Node]:
        work = Work(self.IDS, SamplingParams(max_new_tokens=8))
        return compared(fleet.estimates(work), fleet.prefills)

    def test_few_are_compared(self) -> None:
        assert len(self.compared(by_cost(MAX_COMPARED))) == MAX_COMPARED
        fleet = by_cost(10 * MAX_COMPARED)
        assert len(self.compared(fleet)) == MAX_COMPARED // 2
        for node in fleet.prefills:
            node.holds(40, self.IDS)
        nodes = self.compared(fleet)
        assert MAX_COMPARED // 2 < len(nodes) <= MAX_COMPARED
        assert len({node.ref for node in nodes}) == len(nodes)

    @pytest.mark.parametrize("num_held", [41, 79, 81, 99])
    def test_the_node_that_holds_most_is_among_them(self, num_held: int) -> None:
        """All nodes hold the system prompt, and one the conversation."""
        fleet = by_cost(4 * MAX_COMPARED)
        for node in fleet.prefills:
            node.holds(40, self.IDS)
        fleet.prefills[200].holds(num_held, self.IDS)
        assert fleet.prefills[200] in self.compared(fleet)
        if num_held > 50:
            assert names(fleet, Role.PREFILL, 1, self.IDS) == ["p200"]


class TestWhoComputes:
    """`--local-prefill-tokens auto`: the decode node that holds a conversation, or a prefill node."""

    @staticmethod
    def sent(fleet: SeenFleet, ids: tuple[int, ...] = IDS) -> Decode:
        return decode_of(fleet.start(ids)).last(Decode)

    def test_a_follow_up_stays_where_its_conversation_is(self) -> None:
        fleet = by_cost(1, 2, local=None)
        fleet.decodes[1].holds(3)
        sent = self.sent(fleet)
        assert sent.prefill is None and sent.local_prefill_limit == 2 * (len(IDS) - 3 * PAGE)
        assert not fleet.prefills[0].sent and fleet.decodes[1].sent == [sent]

    @pytest.mark.parametrize(
        ("num_queued_tokens", "kv_bytes_per_s", "is_split"),
        [(0, 0.0, True), (100_000, 0.0, False), (0, 1000.0, False)],
        ids=["idle", "the prefill fleet is busy", "the network is slow"],
    )
    def test_many_streams_there_are_stalled_only_where_it_is_worth_it(
        self, num_queued_tokens: int, kv_bytes_per_s: float, is_split: bool
    ) -> None:
        fleet = by_cost(1, 1, local=None)
        fleet.decodes[0].holds(3)
        fleet.decodes[0].load = Load(
            num_running=30, num_pages=4096, num_free_pages=4096, kv_bytes_per_s=kv_bytes_per_s
        )
        fleet.prefills[0].load = Load(num_queued_tokens=num_queued_tokens)
        assert self.sent(fleet).prefill == (fleet.prefills[0].ref if is_split else None)
        assert [type(message) for message in fleet.prefills[0].sent] == [Prefill] * is_split

    def test_a_prompt_of_which_it_holds_nothing_is_computed_elsewhere(self) -> None:
        fleet = by_cost(1, 1, local=None)
        assert self.sent(fleet).prefill == fleet.prefills[0].ref
        short = self.sent(fleet, IDS[:PAGE])
        assert short.prefill is None and short.local_prefill_limit is None


@pytest.mark.parametrize("name", ["least-load", "power-of-two"])
def test_the_idle_node_of_two_gets_the_request(name: str) -> None:
    fleet = SeenFleet(2, 0, num_prefill=2, prefill=name, decode=name)
    fleet.prefills[0].load = Load(num_queued_tokens=100_000)
    fleet.decodes[1].load = Load(num_running=50)
    nodes = [fleet.start().nodes for _ in range(10)]
    assert {tuple(node.ref.node_id for node in pair) for pair in nodes} == {("p1", "d000")}


def test_two_routers_draw_differently() -> None:
    """`random` and `power-of-two` would lead all routers to the same nodes at once, else."""
    one, other = (
        SeenFleet(1, 0, num_prefill=50, prefill="random", incarnation=name) for name in ("r1", "r2")
    )
    assert names(one, Role.PREFILL, 10) != names(other, Role.PREFILL, 10)


def test_turns_are_those_of_the_nodes_that_took_part() -> None:
    """A request that its decode node prefills has used up no turn of the prefill nodes."""
    fleet = SeenFleet(1, PAGE, num_prefill=2, prefill="round-robin", decode="round-robin")
    fleet.start()
    fleet.start(IDS[:PAGE])
    assert names(fleet, Role.PREFILL, 1) == ["p1"]


def test_sequences_that_move_take_turns_too() -> None:
    fleet = SeenFleet(3, 0, decode="round-robin")
    targets = []
    for number in range(4):
        target = fleet.dispatcher._placement.target(WORK, fleet.decodes[0], {})
        fleet.view.sent(Attempt(ReqKey("router", str(number)), (target,), is_move=True))
        targets.append(target.ref.node_id)
    assert targets == ["d001", "d002"] * 2


def test_a_sequence_moves_to_where_its_pages_have_room() -> None:
    """Nothing is computed there, so what the idler node would compute sooner does not count."""
    fleet = by_cost(1, 3)
    source, full, roomy = fleet.decodes
    full.load = Load(num_running=2, num_pages=4000, gen_throughput=1000.0)
    roomy.load = Load(num_running=4, num_pages=4000, num_free_pages=3000, gen_throughput=1000.0)
    assert fleet.dispatcher._placement.target(WORK, source, {}) is roomy
    full.load = Load(num_running=2, num_pages=4000, num_evictable_pages=5, gen_throughput=1000.0)
    assert fleet.dispatcher._placement.target(WORK, source, {}) is full


def test_what_a_move_costs_is_the_transfer_and_the_place() -> None:
    """Neither the rate of prefills nor --local-prefill-tokens counts, since the target computes nothing of it."""
    fleet = by_cost(1, 3, local=2 * len(IDS))
    source, idle, busy = fleet.decodes
    for node, running, rate in ((idle, 1, 10.0), (busy, 20, 10_000.0)):
        node.load = Load(num_running=running, num_pages=4000, num_free_pages=4000, prefill_tokens_per_s=rate)
    assert fleet.dispatcher._placement.target(WORK, source, {}) is idle


def test_a_prompt_on_a_decode_node_costs_the_pauses_of_its_streams() -> None:
    fleet = by_cost(1, 1)
    node: SeenNode = fleet.decodes[0]
    for running, streams in ((0, 1), (5, 5)):
        node.load = Load(
            num_running=running, num_pages=4096, num_free_pages=4096, prefill_tokens_per_s=1000.0
        )
        estimates = fleet.estimates(WORK)
        own_s = estimates.num_tokens / 1000.0
        assert estimates.local_prefill_s(node) == pytest.approx(own_s * (1 + PAUSE_COSTS * streams))


def test_a_place_costs_the_next_tokens_of_its_neighbours() -> None:
    fleet = by_cost(1, 1)
    node: SeenNode = fleet.decodes[0]
    node.load = Load(num_running=5, num_pages=4096, num_free_pages=4096, gen_throughput=500.0)
    assert fleet.estimates(WORK).place_s(node) == TOKENS_AHEAD * 5 / 500.0
