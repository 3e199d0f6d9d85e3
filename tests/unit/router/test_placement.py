"""Which nodes get a prompt, with nodes whose pongs and caches the test decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from router.dispatch.node import PrefixIndex
from router.dispatch.placement import MAX_IMBALANCE, MIN_SAVED_TOKENS, POLICIES
from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import Decode, Finish, Load, NodeLimits, Prefill, Role, Work
from shared.protocol.sampling_params import SamplingParams
from tests.unit.router.dispatched import IDS, PAGE, SeenFleet, SeenNode


def test_nodes_that_hold_the_same_take_turns() -> None:
    fleet = SeenFleet(4)
    for node in fleet.decodes:
        node.holds(4)
    assert set(fleet.burst(200).values()) == {50}


def test_a_page_that_every_prompt_begins_with_draws_nobody() -> None:
    fleet = SeenFleet(4)
    fleet.decodes[0].holds(1)
    assert set(fleet.burst(200).values()) == {50}


def test_a_burst_between_two_pongs_spills_over() -> None:
    """Nobody's load changes: what this router has sent is all it knows, and it is enough."""
    fleet = SeenFleet(4)
    fleet.decodes[0].holds(4)
    sent = fleet.burst(200)
    assert max(sent.values()) - min(sent.values()) <= MAX_IMBALANCE + 1
    assert sent["d000"] == max(sent.values())


def test_a_second_choice_holds_more_than_the_rest() -> None:
    fleet = SeenFleet(4)
    for node, num_pages in zip(fleet.decodes, (4, 3, 0, 0), strict=True):
        node.holds(num_pages)
    assert fleet.burst(2 * (MAX_IMBALANCE + 1)) == {"d000": MAX_IMBALANCE + 1, "d001": MAX_IMBALANCE + 1}


@pytest.mark.parametrize("num_pages", [MIN_SAVED_TOKENS // PAGE - 1, MIN_SAVED_TOKENS // PAGE])
def test_a_small_share_of_a_long_prompt_counts_when_it_is_many_tokens(num_pages: int) -> None:
    fleet = SeenFleet(2)
    ids = tuple(range(10 * MIN_SAVED_TOKENS))
    fleet.decodes[0].holds(num_pages, ids)
    chosen = [fleet.start(ids).nodes[-1].ref.node_id for _ in range(4)]
    drawn = num_pages * PAGE >= MIN_SAVED_TOKENS
    assert chosen == (["d000"] * 4 if drawn else ["d000", "d001", "d000", "d001"])


def test_what_the_chosen_node_happens_to_hold_need_not_be_computed() -> None:
    """A page is not worth going there for, but whoever is sent there has it."""
    fleet = SeenFleet(1, local_prefill_tokens=4 * PAGE)
    fleet.decodes[0].holds(1)
    fleet.start()
    (sent,) = fleet.decodes[0].sent
    assert isinstance(sent, Decode)
    assert (sent.prefill, sent.local_prefill_limit) == (None, 4 * PAGE)


@pytest.mark.parametrize(
    ("start_len", "alone"),
    [(-1, True), (5 * PAGE - 1, True), (4 * PAGE, True), (4 * PAGE - 1, False), (0, False)],
)
def test_a_scored_position_is_not_cached(start_len: int, alone: bool) -> None:
    """The node computes whatever is to be scored, so it would decline what it was promised to hold."""
    fleet = SeenFleet(1)
    fleet.decodes[0].holds(5)
    fleet.start(logprobs=LogprobParams(start_len=start_len))
    (sent,) = [message for message in fleet.decodes[0].sent if isinstance(message, Decode)]
    assert (sent.prefill is None, sent.local_prefill_limit) == (alone, PAGE if alone else None)


def sent_by(fleet: SeenFleet) -> tuple[str | None, str]:
    """The nodes of one more request: the prefill node, if there is one, and the decode node."""
    nodes = {node.role: node.ref.node_id for node in fleet.start().nodes}
    return nodes.get(Role.PREFILL), nodes[Role.DECODE]


@pytest.mark.parametrize("said_by", [Role.PREFILL, Role.DECODE])
def test_only_pairs_with_a_link_are_chosen(said_by: Role) -> None:
    """Either end may be the one that has noticed: the other one may hang."""
    fleet = SeenFleet(1)
    fleet.prefills = [SeenNode(f"p{i}", Role.PREFILL) for i in range(3)]
    (decode,), hung = fleet.decodes, fleet.prefills[1]
    ends = (decode, hung) if said_by is Role.DECODE else (hung, decode)
    ends[0].load = Load(unreachable={ends[1].ref.incarnation: "silent for 5 s"})
    assert [sent_by(fleet) for _ in range(4)] == [("p0", "d000"), ("p2", "d000")] * 2
    ends[0].load = Load()
    assert ("p1", "d000") in [sent_by(fleet) for _ in range(3)]


def test_a_decode_node_without_any_link_prefills_by_itself() -> None:
    fleet = SeenFleet(2)
    cut_off = fleet.decodes[0]
    cut_off.load = Load(unreachable={fleet.prefills[0].ref.incarnation: "connection refused"})
    assert sorted([sent_by(fleet), sent_by(fleet)], key=str) == [("p0", "d001"), (None, "d000")]
    (sent,) = cut_off.sent
    assert isinstance(sent, Decode)
    assert (sent.prefill, sent.local_prefill_limit) == (None, None)


class TestWhichNodeEvictsFirst:
    """Of the prompts that two nodes will have cached, each fleet keeps a share: that of its room for them in all."""

    def told(
        self, fleet: SeenFleet, count: int = 400, **params: object
    ) -> Counter[tuple[bool | None, bool | None]]:
        """What each request tells its prefill and its decode node; None where it has none."""
        told: Counter[tuple[bool | None, bool | None]] = Counter()
        for _ in range(count):
            for node in fleet.nodes:
                node.sent.clear()
            fleet.start(**params)  # type: ignore[arg-type]
            flags = {type(m): m.evict_first for node in fleet.nodes for m in node.sent}
            told[flags.get(Prefill), flags.get(Decode)] += 1
        return told

    @pytest.mark.parametrize(
        ("prefill", "decode", "kept"),
        [
            (Load(), Load(), 0.5),
            (Load(num_free_pages=30), Load(num_evictable_pages=30), 0.25),
            (Load(num_free_pages=10, num_evictable_pages=80), Load(num_free_pages=10), 0.75),
            (Load(num_free_pages=9), Load(num_held_pages=99), 1.0),
            (Load(num_held_pages=99), Load(num_free_pages=9), 0.0),
        ],
    )
    def test_a_fleet_keeps_as_much_as_it_has_room_for(self, prefill: Load, decode: Load, kept: float) -> None:
        fleet = SeenFleet(3)
        fleet.prefills[0].load = prefill
        for node in fleet.decodes:
            node.load = decode
        told = self.told(fleet)
        assert set(told) <= {(True, False), (False, True)}, "one of the two, and not both"
        assert told[False, True] / told.total() == pytest.approx(kept, abs=0.1 if 0 < kept < 1 else 0.0)

    def test_a_prompt_that_is_on_one_node_is_kept_there(self) -> None:
        fleet = SeenFleet(2, local_prefill_tokens=len(IDS))
        fleet.decodes[0].holds(1)
        assert self.told(fleet, 4) == {(None, False): 4}
        assert self.told(SeenFleet(1), 4, max_new_tokens=1) == {(False, None): 4}


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_token_or_none_needs_no_decode_node_and_no_link(wanted: int) -> None:
    fleet = SeenFleet(1)
    fleet.prefills[0].load = Load(unreachable={fleet.decodes[0].ref.incarnation: "connection refused"})
    req = fleet.start(max_new_tokens=wanted)
    assert req.nodes == tuple(fleet.prefills) and fleet.prefills[0].last(Prefill).decode is None
    fleet.tell(req, *range(wanted), finish=Finish("length"))
    assert req.output_ids == [*range(wanted)] and not fleet.decodes[0].sent


def test_a_decode_node_with_room_for_one_token_gets_no_pages() -> None:
    fleet = SeenFleet(1)
    fleet.decodes[0].limits = NodeLimits(len(IDS) + 1, 65_536, 64)
    req = fleet.start(max_new_tokens=50)
    assert [node.ref.node_id for node in req.nodes] == ["p0"]
    assert req.work.params.max_new_tokens == 1


@pytest.mark.parametrize("wanted", [1, 12])
def test_a_prompt_too_long_for_the_prefill_node_goes_to_the_decode_node_alone(wanted: int) -> None:
    fleet = SeenFleet(1)
    fleet.prefills[0].limits = NodeLimits(len(IDS) - 1, 65_536, 64)
    assert fleet.start(max_new_tokens=wanted).nodes == tuple(fleet.decodes)


def test_one_node_for_both_roles() -> None:
    fleet = SeenFleet(1, num_prefill=0)
    assert fleet.start().nodes == tuple(fleet.decodes)


@pytest.mark.parametrize(("split", "nodes"), [(True, ["p0", "d000"]), (False, ["d000"])])
def test_a_short_prompt_is_split_only_where_that_is_asked_for(split: bool, nodes: list[str]) -> None:
    fleet = SeenFleet(1, local_prefill_tokens=len(IDS))
    req = fleet.dispatcher.start(Work(IDS, SamplingParams()), lambda: None, split=split)
    assert [node.ref.node_id for node in req.nodes] == nodes


class TestCounts:
    """A node's sequences, when pongs and dispatches mix. That none stays counted is in tests/prop."""

    def test_other_routers_sequences_are_added(self) -> None:
        fleet = SeenFleet(1)
        (node,) = fleet.decodes
        node.load = Load(num_running=90, num_waiting=5, num_transferring=3, num_bootstrapping=2)
        reqs = [fleet.start() for _ in range(10)]
        assert fleet.view.seqs.of(node) == 110
        node.load = Load(num_running=108)  # it has heard of 8 of the ten
        assert fleet.view.seqs.of(node) == 108
        for req in reqs[:4]:
            fleet.dispatcher.release(req)
        assert fleet.view.seqs.of(node) == 104

    def test_what_was_sent_counts_when_the_node_has_not_heard_of_it(self) -> None:
        fleet = SeenFleet(1)
        (node,) = fleet.decodes
        fleet.burst(10)
        node.load = Load()  # of a Ping that overtook them all
        assert fleet.view.seqs.of(node) == 10


class CountingIndex(PrefixIndex):
    """Counts the looks at it."""

    num_looks = 0

    def __contains__(self, block: int) -> bool:
        self.num_looks += 1
        return super().__contains__(block)

    def num_blocks(self, hashes: Sequence[int], at_least: int = 0) -> int:
        self.num_looks += 1
        return super().num_blocks(hashes, at_least)


def test_a_large_fleet_is_looked_through_twice() -> None:
    """By the policy of the decode nodes, and for nodes that could lend. Those that hold much are looked at again."""
    fleet = SeenFleet(1000)
    for node in fleet.decodes:
        node.prefixes = CountingIndex()
        node.holds(0)
    fleet.decodes[123].holds(4)
    fleet.decodes[456].holds(3)
    assert fleet.start().nodes[-1] is fleet.decodes[123]
    looks = [node.prefixes.num_looks for node in fleet.decodes if isinstance(node.prefixes, CountingIndex)]
    assert sum(looks) == 2 * 1000 + 2


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_chooses_among_the_candidates(policy: str) -> None:
    fleet = SeenFleet(3)
    for num_pages, node in enumerate(fleet.decodes):
        node.holds(num_pages)
    for last in ("", "d000", "d002", "gone"):
        for nodes in (fleet.decodes, fleet.prefills):
            request = fleet.estimates(Work(IDS, SamplingParams()))
            fleet.view.last[nodes[0].role] = last
            assert POLICIES[policy](request, nodes) in nodes


def test_a_policy_sees_what_a_resumed_request_has_said() -> None:
    fleet = SeenFleet(1)
    fleet.decodes[0].holds(5)
    params = SamplingParams(logprobs=LogprobParams(start_len=0))  # told with output position 0, so long ago
    work = Work(IDS[: 4 * PAGE], params, output_ids=IDS[4 * PAGE :] + (7,))
    assert fleet.estimates(work).num_cached_pages(fleet.decodes[0]) == 5
