"""The autoscaler's properties, under any load: over a simple fleet of arithmetic, and over real schedulers."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.autoscaler.capacity import (
    CATCH_UP_S,
    GOOD_SHARE,
    KV_USE,
    MAX_PREFILL_USE,
    MIN_PREFILL_USE,
    Capacity,
    Work,
)
from planner.autoscaler.decision import (
    RATE_S,
    Add,
    Autoscaler,
    Drain,
    FleetSeen,
    NodeBounds,
    NodeSeen,
    NodeState,
    Pace,
)
from planner.candidate import Candidate
from planner.cost_model import CostModel
from planner.figures import Slo
from planner.profile import Measured, NodeKind, Profile, RouterCost, TransferCost
from planner.simulate import fleet_shape
from planner.simulator.fleet import Outcome, SimFleet
from planner.traffic.trace import SimRequest
from shared.errors import ConfigError
from shared.protocol.messages import Role
from tests.sim.autoscaling import SimAutoscaling

PROFILE = Profile(
    measured=Measured(at="2026-01-01T00:00:00Z", machine="made up", model="made up", versions={}),
    node=NodeKind(
        pool_tokens=32_768,
        page_size=32,
        context_length=8_192,
        max_running_requests=64,
        chunked_prefill_size=2_048,
        kv_bytes_per_token=16_384,
        start_s=20.0,
    ),
    forward=CostModel(a=0.004, b=1e-4, c=0.0, d=0.01, e=4e-4, f=1e-6, step_s=0.0005),
    transfer=TransferCost(latency_s=0.0005, bytes_s=1e9),
    router=RouterCost(request_s=1e-4, token_s=1e-5),
)
SLO = Slo(ttft_s=1.0, itl_s=0.03)
CAPACITY = Capacity(PROFILE, SLO)
PROMPT, OUTPUT = 1000, 150
KV_TOKENS = PROMPT + OUTPUT / 2
NUM_PAGES = PROFILE.node.pool_tokens // PROFILE.node.page_size
PREFILL = CAPACITY.prefill(PROMPT, 0)
DECODE = CAPACITY.decode(KV_TOKENS, NUM_PAGES)


@dataclass(eq=False)
class ModelFleet:
    """Nodes of one role as arithmetic: a queue of prompts, or a batch of requests. Seconds advance by `advance`.

    It checks every action when it is carried out. `noise` disturbs what is seen of the work, as a share of it.
    Whether it meets the SLO, and how many nodes are needed, is the formula of `Capacity` itself: what is tested here
    is when nodes are added and drained. That the formula is right, test_autoscaler_capacity.py tests.
    """

    role: Role
    bounds: NodeBounds
    pace: Pace
    num_nodes: int
    keep: frozenset[str] = frozenset()
    noise: float = 0.0
    start_late: Callable[[], float] = lambda: 0.0
    """Seconds by which a node comes late; infinity for one that never comes."""
    fails: float = 0.0
    """Of the actions, the share that cannot be carried out."""
    loses: float = 0.0
    """Nodes a second that are lost. Some come back."""
    shows_coming: bool = False
    """Whether nodes are seen while they start."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    now: float = 0.0
    rate: float = 0.0
    """Requests a second."""
    waiting: float = 0.0
    """Requests: those without a first token, of prefill; those without a place, of decode."""
    running: float = 0.0
    served: float = 0.0
    """Tokens a second, in the last second."""
    actions: list[tuple[float, Add | Drain]] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    coming: list[tuple[float, float, str]] = field(default_factory=list)
    """When asked for, when due, and the name."""
    lost: list[tuple[float, float, str]] = field(default_factory=list)
    """Since when, until when, and the name."""
    seen_live: list[str] = field(default_factory=list)
    """At the last look. One that comes and goes between two looks is as one that never came."""
    draining: dict[str, float] = field(default_factory=dict)
    num_overdue: int = 0
    """Nodes that were given up."""

    def __post_init__(self) -> None:
        self.live = [f"n{i}" for i in range(self.num_nodes)]
        self.num_ever = self.num_nodes
        self.autoscaler = Autoscaler(self.role, self.bounds, self.pace, CAPACITY, self.keep)
        self.rates: deque[float] = deque(maxlen=round(RATE_S))

    # ---------------------------------------------------------------------------------------- the work
    def advance(self, seconds: float) -> None:
        """Serve for so long, and let nodes come and leave."""
        for _ in range(round(seconds)):
            self.now += 1
            for nodes in (self.coming, self.lost):
                for node in [node for node in nodes if node[1] <= self.now]:
                    nodes.remove(node)
                    self.live.append(node[2])
            if self.seen_live and self.rng.random() < self.loses:
                away_s = self.rng.choice([20.0, 150.0, 500.0, math.inf])
                name = self.seen_live.pop()
                self.live.remove(name)
                self.lost.append((self.now, self.now + away_s, name))
            self.draining = {name: at for name, at in self.draining.items() if at > self.now}
            (self._prefill if self.role is Role.PREFILL else self._decode)()
            self.rates.append(self.rate if self.role is Role.PREFILL else self.served)

    def _prefill(self) -> None:
        can = len(self.live) * PREFILL.tokens_s / PROMPT
        self.waiting = max(0.0, self.waiting + self.rate - can)

    def _decode(self) -> None:
        self.waiting += self.rate
        most = len(self.live) * min(PROFILE.node.max_running_requests, PROFILE.node.pool_tokens / KV_TOKENS)
        moved = min(self.waiting, max(0.0, most - self.running))
        self.running, self.waiting = self.running + moved, self.waiting - moved
        self.served = self.running / self.itl_s
        self.running = max(0.0, self.running - self.served / OUTPUT)

    @property
    def itl_s(self) -> float:
        forward, batch = PROFILE.forward, self.running / max(1, len(self.live))
        return forward.d + batch * (forward.e + forward.f * KV_TOKENS)

    @property
    def meets(self) -> bool:
        """The SLO."""
        if self.role is Role.DECODE:
            return self.waiting < 1 and self.itl_s <= SLO.itl_s
        return self.waiting < 1 and self.needed <= len(self.live) * (1 + 1e-6)

    @property
    def needed(self) -> float:
        """Nodes, for the rate as it is."""
        if self.role is Role.DECODE:
            return DECODE.nodes(self.rate * OUTPUT)
        return PREFILL.nodes(self.rate * PROMPT)

    # ----------------------------------------------------------------------------------- what is seen
    def _work(self) -> Work:
        rate = sum(self.rates) / len(self.rates) * (1 + self.rng.uniform(-self.noise, self.noise))
        if self.role is Role.PREFILL:
            return Work(
                prompt_tokens_s=rate * PROMPT,
                num_queued_tokens=self.waiting * PROMPT,
                tokens_per_prompt=PROMPT,
            )
        num_running = math.ceil(
            self.running
        )  # each with its pages, or they would seem to have shorter contexts
        return Work(
            output_tokens_s=rate,
            mean_running=self.running,
            num_running=num_running,
            num_waiting=math.ceil(self.waiting),
            num_held_pages=math.ceil(num_running * KV_TOKENS / PROFILE.node.page_size),
            num_pages=NUM_PAGES,
        )

    def seen_coming(self) -> list[str]:
        """Nodes that start, or are started again."""
        if not self.shows_coming:
            return []
        return [name for _, due, name in (*self.coming, *self.lost) if due - self.now < self.pace.start_s]

    def look(self) -> None:
        """One look of the autoscaler, and what it decides is done."""
        seen = [NodeSeen(node_id=name, state=NodeState.LIVE) for name in self.live]
        seen += [NodeSeen(node_id=name, state=NodeState.DRAINING) for name in self.draining]
        seen += [NodeSeen(node_id=name, state=NodeState.COMING) for name in self.seen_coming()]
        self.seen_live = list(self.live)
        decision = self.autoscaler.decide(self.now, FleetSeen(nodes=tuple(seen), work=self._work()))
        self.num_overdue += decision.num_overdue
        if decision.action is None:
            return
        assert decision.reason
        for at, earlier in self.actions:
            if type(earlier) is not type(decision.action):
                assert self.now - at >= self.pace.settle_s, (at, earlier, self.now, decision)
        self.actions.append((self.now, decision.action))
        failed = self.rng.random() < self.fails
        match decision.action:
            case Add(num_nodes) if failed:
                self.autoscaler.add_failed(num_nodes, self.now)
            case Drain(node_id) if failed:
                self.autoscaler.drain_failed(node_id)
            case Add(num_nodes):
                self._add(num_nodes)
            case Drain(node_id):
                self._drain(node_id)

    def _add(self, num_nodes: int) -> None:
        assert num_nodes > 0
        for _ in range(num_nodes):
            due = self.now + self.pace.start_s + self.start_late()
            self.coming.append((self.now, due, f"n{self.num_ever}"))
            self.num_ever += 1
        limit_s = self.pace.start_limit_s
        expected = {name for at, _, name in (*self.coming, *self.lost) if self.now - at < limit_s}
        expected.update(self.seen_coming())
        assert len(self.live) + len(expected) + len(self.draining) <= self.bounds.most

    def _drain(self, node_id: str) -> None:
        assert node_id in self.live and node_id not in self.keep
        self.live.remove(node_id)
        self.seen_live.remove(node_id)
        self.draining[node_id] = self.now + 10
        left = len(self.live)
        assert left >= max(1, self.bounds.least)
        if left >= self.bounds.most:
            return  # one more than may be
        if self.role is Role.DECODE:
            assert self.running * KV_TOKENS <= KV_USE * left * PROFILE.node.pool_tokens
            assert self.running + self.waiting <= left * DECODE.batch
        assert self.noise > 0.1 or self.needed <= left * (1 + self.noise) + 1e-6

    # ------------------------------------------------------------------------------------------ runs
    def serve(self, rate: float, seconds: float) -> list[tuple[float, Add | Drain]]:
        """Look again and again under a constant rate. The actions that were taken."""
        self.rate, num = rate, len(self.actions)
        until = self.now + seconds
        while self.now < until:
            self.advance(self.pace.interval_s)
            self.look()
        return self.actions[num:]

    def recovery_s(self, rate: float) -> float:
        """The stated time, and what a queue takes longer than CATCH_UP_S if nodes are few."""
        noticed_s = self.pace.recovery_s - CATCH_UP_S
        per_node = (
            PREFILL.tokens_s / PROMPT if self.role is Role.PREFILL else DECODE.batch / DECODE.step_s / OUTPUT
        )
        spare = self.bounds.most * per_node - rate
        return noticed_s + max(CATCH_UP_S, 1.2 * rate * noticed_s / spare)


SLOW = CostModel(a=0.004, b=4e-4, c=0.0, d=0.02, e=8e-3, f=1e-6, step_s=0.0005)
"""Of nodes that few requests fill, so that a simulation of minutes is short."""
PACE = Pace(start_s=20.0, settle_s=30.0, window_s=60.0)
roles = st.sampled_from(Role)
most_nodes = st.integers(1, 8)
paces = st.builds(
    Pace,
    start_s=st.sampled_from([2.0, 20.0, 90.0]),
    settle_s=st.sampled_from([15.0, 60.0, 120.0]),
    window_s=st.sampled_from([30.0, 120.0, 300.0]),
)


def rate_for(role: Role, nodes: float) -> float:
    """The requests a second that need so many nodes."""
    if role is Role.DECODE:
        running = (math.sqrt(DECODE.spread**2 + 4 * nodes * DECODE.batch) - DECODE.spread) ** 2 / 4
        return running / DECODE.step_s / OUTPUT
    by_waits = nodes**2 * PREFILL.waits / (1 + nodes * PREFILL.waits)
    return max(MIN_PREFILL_USE * nodes, min(by_waits, MAX_PREFILL_USE * nodes)) * PREFILL.tokens_s / PROMPT


@settings(max_examples=40, deadline=None)
@given(
    roles, paces, most_nodes, st.integers(0, 8), st.lists(st.floats(0.0, 12.0), min_size=2, max_size=5),
    st.integers(0, 1 << 30),
)  # fmt: skip
@example(Role.PREFILL, Pace(start_s=20.0, settle_s=15.0, window_s=30.0), 5, 3, [3.0, 0.0, 4.0], 6225)
def test_whatever_comes_no_opposite_actions_and_no_more_nodes_than_allowed(
    role: Role, pace: Pace, most: int, extra: int, loads: list[float], seed: int
) -> None:
    """Also where nodes come late or never or are lost, actions fail, and what is seen is noisy.

    `ModelFleet` checks each.
    """
    rng = random.Random(seed)
    fleet = ModelFleet(
        role,
        NodeBounds(rng.randint(1, most), most),
        pace,
        num_nodes=1 + extra,
        keep=frozenset({"n0"}),
        noise=0.5,
        start_late=lambda: rng.choice([0.0, 0.0, 30.0, 400.0, math.inf]),
        fails=rng.choice([0.0, 0.3]),
        loses=rng.choice([0.0, 0.01]),
        shows_coming=rng.choice([False, True]),
        rng=rng,
    )
    for load in loads:
        fleet.serve(rate_for(role, load), rng.choice([20.0, 100.0, 400.0]))


@settings(max_examples=40, deadline=None)
@given(roles, paces, st.lists(st.floats(0.05, 0.8), min_size=2, max_size=4), most_nodes)
@example(Role.DECODE, Pace(start_s=2.0, settle_s=15.0, window_s=30.0), [0.5, 0.20703125], 5)
def test_after_a_step_the_slo_is_met_again_within_the_stated_time(
    role: Role, pace: Pace, shares: list[float], most: int
) -> None:
    """And stays met, while nodes that are not needed are drained. A share is of what the nodes allowed can take."""
    fleet = ModelFleet(role, NodeBounds(1, most), pace, num_nodes=1)
    for share in shares:
        rate = rate_for(role, share * most)
        recovery_s = fleet.recovery_s(rate)
        fleet.serve(rate, recovery_s)
        for _ in range(30):
            fleet.serve(rate, 2 * pace.interval_s)
            assert fleet.meets, (fleet.now, fleet.live, fleet.waiting, fleet.running, fleet.actions)


@pytest.mark.parametrize("role", Role)
def test_nodes_that_never_come_are_given_up_once_and_forgotten(role: Role) -> None:
    """What comes later is no slower for it: the SLO is met again within the stated time, and no other is given up."""
    never = [math.inf, math.inf]
    fleet = ModelFleet(
        role, NodeBounds(1, 12), PACE, num_nodes=1, start_late=lambda: never.pop() if never else 0.0
    )
    fleet.serve(rate_for(role, 2.5), PACE.recovery_s + 2 * PACE.start_limit_s)
    assert not never and fleet.num_overdue == 2 and fleet.meets
    for nodes in (5.0, 10.0):
        fleet.serve(rate_for(role, nodes), fleet.recovery_s(rate_for(role, nodes)))
        assert fleet.meets
    assert fleet.num_overdue == 2


def test_an_add_that_fails_after_it_was_given_up_takes_no_other_node_away() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(2, 4), PACE, CAPACITY)
    seen = FleetSeen(nodes=(NodeSeen(node_id="n0", state=NodeState.LIVE),), work=None)
    times = (PACE.interval_s * look for look in range(100))
    added = (now for now in times if isinstance(autoscaler.decide(now, seen).action, Add))
    first, second = next(added), next(added)
    autoscaler.add_failed(1, first)
    assert autoscaler.decide(second + 1.0, seen).action is None
    autoscaler.add_failed(1, second)
    assert autoscaler.decide(second + 2.0, seen).action == Add(1)


def live(*names: str) -> FleetSeen:
    return FleetSeen(nodes=tuple(NodeSeen(node_id=name, state=NodeState.LIVE) for name in names), work=None)


def test_an_add_that_fails_takes_its_own_nodes_away() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(1, 4), PACE, CAPACITY)
    autoscaler._orders.extend([10.0, 20.0, 20.0, 30.0])
    autoscaler.add_failed(2, 20.0)
    assert list(autoscaler._orders) == [10.0, 30.0]


@pytest.mark.parametrize("comes", [False, True])
def test_the_node_that_was_asked_for_first_counts_as_come_or_is_given_up_first(comes: bool) -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(1, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0"))
    autoscaler._orders.extend([0.0, 50.0])
    seen = live("n0", "n1") if comes else live("n0")
    autoscaler.decide(60.0, seen)
    limit_s = PACE.start_limit_s
    overdue = [autoscaler.decide(now, seen).num_overdue for now in (limit_s, limit_s + 5.0, limit_s + 50.0)]
    assert overdue == [0 if comes else 1, 0, 1]


def test_a_node_that_came_late_leaves_the_place_of_the_one_that_was_asked_for_again() -> None:
    """Three nodes are wanted and allowed. Two are given up and asked for again, and one of the two comes late."""
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(3, 3), PACE, CAPACITY)

    def decide(now: float, *names: str) -> tuple[Add | Drain | None, int, int]:
        decision = autoscaler.decide(now, live(*names))
        return decision.action, decision.num_coming, decision.num_overdue

    assert decide(0.0, "n0") == (None, 0, 0)
    assert decide(60.0, "n0") == (Add(2), 0, 0)
    assert decide(100.0) == (None, 3, 0)  # n0 may be restarted
    assert decide(160.0) == (Add(2), 1, 2)
    assert decide(170.0, "n1") == (None, 2, 0)
    assert decide(200.0, "n1") == (None, 1, 0)  # n0 is lost, but both of the second two may still come
    assert "1 node more may come, late" in autoscaler.decide(201.0, live("n1")).reason
    assert decide(260.0, "n1") == (Add(2), 0, 1)


def states(**of: NodeState) -> FleetSeen:
    nodes = tuple(NodeSeen(node_id=name, state=state) for name, state in of.items())
    return FleetSeen(nodes=nodes, work=None)


@pytest.mark.parametrize("state", [NodeState.LIVE, NodeState.COMING])
def test_a_lost_node_that_comes_back_is_not_the_one_that_was_asked_for_in_its_place(state: NodeState) -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(2, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0", "n1"))
    assert autoscaler.decide(40.0, live("n0")).action is None
    assert autoscaler.decide(140.0, live("n0")).action == Add(1)
    assert autoscaler.decide(145.0, live("n0")).action is None
    autoscaler.bounds = NodeBounds(3, 4)
    decision = autoscaler.decide(150.0, states(n0=NodeState.LIVE, n1=state))
    assert (decision.action, decision.num_live + decision.num_coming) == (None, 3)


def test_a_lost_node_that_comes_back_after_ten_minutes_is_a_new_one() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(2, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0", "n1"))
    autoscaler.decide(40.0, live("n0"))
    assert autoscaler.decide(140.0, live("n0")).action == Add(1)
    assert autoscaler.decide(160.0, live("n0", "n2")).action is None
    autoscaler.bounds = NodeBounds(3, 4)
    assert autoscaler.decide(740.0, live("n0", "n2")).action == Add(1)
    assert autoscaler.decide(745.0, live("n0", "n1", "n2")).num_coming == 0


def test_a_node_whose_add_took_a_while_is_given_up_later() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(2, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0"))
    assert autoscaler.decide(60.0, live("n0")).action == Add(1)
    autoscaler.add_done(1, 60.0, 110.0)
    assert autoscaler.decide(205.0, live("n0")).action is None
    assert autoscaler.decide(210.0, live("n0")).action == Add(1)


def test_a_node_that_starts_after_one_was_given_up_may_be_either() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(2, 3), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0"))
    assert autoscaler.decide(60.0, live("n0")).action == Add(1)
    assert autoscaler.decide(160.0, live("n0")).action == Add(1)
    autoscaler.bounds = NodeBounds(3, 3)
    decision = autoscaler.decide(170.0, states(n0=NodeState.LIVE, n1=NodeState.COMING))
    assert decision.action is None and "1 node more may come" in decision.reason


def test_a_node_that_is_seen_to_start_takes_one_place() -> None:
    """Of two that were asked for one after the other, the first was given up. One of the two starts."""
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(2, 4), PACE, CAPACITY)
    assert autoscaler.decide(0.0, live("n0")).action is None
    assert autoscaler.decide(60.0, live("n0")).action == Add(1)
    assert autoscaler.decide(160.0, live("n0")).action == Add(1)
    assert autoscaler.decide(170.0, live("n0", "n1")).action is None  # the other may still come
    autoscaler.bounds = NodeBounds(4, 4)
    seen = states(n0=NodeState.LIVE, n1=NodeState.LIVE, n2=NodeState.COMING)
    decision = autoscaler.decide(175.0, seen)
    assert (decision.action, decision.num_coming) == (Add(1), 1)


def test_a_node_that_never_comes_is_in_doubt_for_ten_minutes() -> None:
    """However often another is asked for meanwhile, and comes."""
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(2, 3), PACE, CAPACITY)
    assert autoscaler.decide(0.0, live("n0")).action is None
    assert autoscaler.decide(60.0, live("n0")).action == Add(1)
    assert autoscaler.decide(160.0, live("n0")).action == Add(1)
    autoscaler.bounds = NodeBounds(3, 3)
    assert "1 node more may come" in autoscaler.decide(170.0, live("n0", "n1")).reason
    assert autoscaler.decide(260.0, live("n0", "n1")).action == Add(1)
    assert autoscaler.decide(280.0, live("n0", "n1", "n2")).action is None
    for drained, at in (("n2", 765.0), ("n3", 825.0)):
        left = {"n0": NodeState.LIVE, "n1": NodeState.LIVE}
        autoscaler.decide(at, states(**left, **{drained: NodeState.DRAINING}))
        assert autoscaler.decide(at + PACE.settle_s, live(*left)).action == Add(1)
        assert autoscaler.decide(at + PACE.settle_s + 20.0, live(*left, "n3")).action is None


@pytest.mark.parametrize(("asked_s", "is_remembered"), [(699.0, True), (700.0, False)])
def test_a_node_that_was_given_up_is_remembered_for_ten_minutes(asked_s: float, is_remembered: bool) -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(1, 3), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0"))
    autoscaler._orders.append(0.0)
    assert autoscaler.decide(PACE.start_limit_s, live("n0")).num_overdue == 1
    autoscaler._orders.append(asked_s)
    autoscaler.decide(asked_s, live("n0", "n1"))
    assert len(autoscaler._doubts) == is_remembered
    assert autoscaler.decide(asked_s + PACE.start_limit_s, live("n0", "n1")).num_overdue == 0
    assert not autoscaler._doubts


def test_an_add_that_fails_was_none_that_may_come_late() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(1, 3), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0"))
    autoscaler._orders.extend([0.0, 50.0])
    autoscaler.decide(PACE.start_limit_s, live("n0"))
    autoscaler.add_failed(1, 0.0)
    assert not autoscaler._overdue
    autoscaler.add_failed(1, 50.0)
    assert not autoscaler._orders


@pytest.mark.parametrize(("failed", "num_coming"), [(110.0, 1), (120.0, 0)])
def test_of_two_orders_one_fails_of_which_the_older_is_in_doubt(failed: float, num_coming: int) -> None:
    """No other order is in doubt for it, and the older one stays so if it is the other that fails."""
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(1, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0"))
    autoscaler._orders.append(0.0)
    autoscaler.decide(100.0, live("n0"))
    autoscaler._orders.extend([110.0, 120.0])
    assert autoscaler.decide(125.0, live("n0", "n1")).num_coming == 1
    autoscaler.add_failed(1, failed)
    assert autoscaler.decide(130.0, live("n0", "n1")).num_coming == num_coming


def test_a_drained_node_that_is_kept_is_none_that_was_asked_for() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(3, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0", "n1"))
    assert autoscaler.decide(30.0, live("n0", "n1")).action == Add(1)
    autoscaler.decide(35.0, states(n0=NodeState.LIVE, n1=NodeState.DRAINING))
    assert autoscaler.decide(40.0, live("n0", "n1")).num_coming == 1


def test_a_late_node_and_its_replacement_leave_no_place_taken() -> None:
    """Both have come. Others drain two of the five, so one of four is missing, and may be asked for."""
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(4, 4), PACE, CAPACITY)
    old = ("n0", "n1", "n2")
    autoscaler.decide(0.0, live(*old))
    assert autoscaler.decide(60.0, live(*old)).action == Add(1)
    assert autoscaler.decide(160.0, live(*old)).action == Add(1)
    autoscaler.decide(165.0, live(*old, "late"))
    autoscaler.decide(170.0, live(*old, "late", "new"))
    left = dict.fromkeys(("n0", "late", "new"), NodeState.LIVE)
    autoscaler.decide(175.0, states(**left, n1=NodeState.DRAINING, n2=NodeState.DRAINING))
    assert autoscaler.decide(205.0, states(**left)).action == Add(1)


def test_a_late_node_that_was_not_asked_for_again_leaves_no_doubt() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(1, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0"))
    autoscaler._orders.append(0.0)
    autoscaler.decide(100.0, live("n0"))
    autoscaler.decide(105.0, live("n0", "n1"))
    autoscaler._orders.append(110.0)
    assert autoscaler.decide(115.0, live("n0", "n1")).num_coming == 1


def test_of_the_orders_the_newest_are_still_to_come() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(1, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0"))
    autoscaler._orders.append(0.0)
    autoscaler.decide(100.0, live("n0"))
    autoscaler._orders.extend([100.0, 110.0])
    autoscaler.decide(115.0, live("n0", "n1"))
    assert autoscaler._coming(115.0) == ([110.0 + PACE.start_s - 115.0], 1)


def test_a_node_being_drained_is_named_before_one_that_may_come() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(4, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0", "n1"))
    autoscaler._orders.append(0.0)
    autoscaler.decide(100.0, live("n0", "n1"))
    seen = states(n0=NodeState.LIVE, n1=NodeState.DRAINING, n2=NodeState.LIVE)
    assert "waits until 1 node being drained has left" in autoscaler.decide(105.0, seen).reason


def test_a_node_that_comes_at_the_last_look_is_not_given_up() -> None:
    autoscaler = Autoscaler(Role.DECODE, NodeBounds(1, 4), PACE, CAPACITY)
    autoscaler.decide(0.0, live("n0"))
    autoscaler._orders.append(0.0)
    assert autoscaler.decide(PACE.start_limit_s, live("n0", "n1")).num_overdue == 0


@settings(max_examples=40, deadline=None)
@given(roles, st.floats(0.0, 8.0), st.floats(0.0, 0.1), st.integers(1, 8))
def test_a_constant_load_ends_in_a_constant_number_of_nodes(
    role: Role, load: float, noise: float, num_nodes: int
) -> None:
    """No node is added after one was drained; noise of up to a tenth does not matter; no node too many stays."""
    fleet = ModelFleet(role, NodeBounds(1, 9), PACE, num_nodes=num_nodes, noise=noise)
    actions = [action for _, action in fleet.serve(rate_for(role, load), 1500.0)]
    first = next((at for at, action in enumerate(actions) if isinstance(action, Drain)), len(actions))
    assert all(isinstance(action, Drain) for action in actions[first:]), actions
    assert not fleet.serve(fleet.rate, 1000.0)
    left = len(fleet.live)
    assert fleet.needed <= left * (1 + noise) + 1e-6
    assert left == 1 or fleet.needed * (1 + noise) > PACE.low * (left - 1) * 0.85, (fleet.needed, left)


# ------------------------------------------------------------------------------------ real schedulers
def arrivals(rng: random.Random, rates: Sequence[tuple[float, float]]) -> list[SimRequest]:
    """Poisson arrivals: each rate, in requests a second, for so many seconds. Nothing is shared."""
    requests: list[SimRequest] = []
    at_s, ends_s = 0.0, 0.0
    for rate, seconds in rates:
        ends_s += seconds
        while (at_s := at_s + rng.expovariate(rate)) < ends_s:
            own = 40 * len(requests)
            requests.append(SimRequest(at_s, 1000, 40, tuple(range(own, own + 32)), 32))
        at_s = ends_s
    return requests


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["together", "split"])
def test_real_schedulers_meet_the_slo_again_after_a_step_and_lose_nothing(num_prefill: int) -> None:
    """More load than one node takes comes and goes, and nodes with it. Requests arrive at random."""
    profile = Profile(
        measured=PROFILE.measured,
        node=PROFILE.node,
        forward=SLOW,
        transfer=PROFILE.transfer,
        router=PROFILE.router,
    )
    slo, most = Slo(ttft_s=2.0, itl_s=0.06), 6
    low_s, high_s = 60.0, PACE.recovery_s + 60
    rates = [(0.5, low_s), (2.5, high_s), (0.5, 150.0)]
    requests = arrivals(random.Random(num_prefill), rates)
    fleet = SimFleet(fleet_shape(Candidate(num_prefill=num_prefill, num_decode=1), profile, profile), SLOW)
    roles = [Role.PREFILL, Role.DECODE] if num_prefill else [Role.DECODE]
    autoscalers = [Autoscaler(role, NodeBounds(1, most), PACE, Capacity(profile, slo)) for role in roles]
    fleet.submit(requests)
    scaling = SimAutoscaling(fleet, autoscalers, until=low_s + high_s + 150)
    fleet.run()

    outcomes = list(fleet.outcomes.values())
    assert len(outcomes) == len(requests) and all(outcome.ok for outcome in outcomes)
    recovered = [o for o in outcomes if low_s + PACE.recovery_s <= o.started_at <= low_s + high_s]
    good = [o for o in recovered if o.ttft_s <= slo.ttft_s and itl_s(o) <= slo.itl_s]
    assert len(good) >= GOOD_SHARE * len(recovered) > 100, (len(good), len(recovered), scaling.taken)
    for role in roles:
        taken = [one for one in scaling.taken if one.role is role]
        kinds = [type(one.action) for one in taken]
        assert kinds == sorted(kinds, key=[Add, Drain].index), "it grows, and then it shrinks"
        assert {Add, Drain} == set(kinds)
        num_nodes = [1]
        for before, one in zip([None, *taken], taken, strict=False):
            if before is not None and (isinstance(one.action, Drain) or isinstance(before.action, Drain)):
                assert one.at - before.at >= PACE.settle_s
            num_nodes.append(num_nodes[-1] + (one.action.num_nodes if isinstance(one.action, Add) else -1))
        assert max(num_nodes) <= most and min(num_nodes) == 1


def itl_s(outcome: Outcome) -> float:
    assert outcome.ended_at is not None and outcome.first_token_at is not None
    return (outcome.ended_at - outcome.first_token_at) / (outcome.num_tokens - 1)


@pytest.mark.parametrize(
    ("slo", "flag"),
    [
        (Slo(ttft_s=0.004, itl_s=1.0), "--slo-ttft-ms 4"),
        (Slo(ttft_s=1.0, itl_s=0.01), "--slo-itl-ms 10"),
    ],
)
def test_an_slo_that_an_idle_node_misses_is_refused(slo: Slo, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: .* no number of nodes meets it"):
        Capacity(PROFILE, slo)


def test_what_a_node_takes_follows_from_its_profile() -> None:
    forward, node = PROFILE.forward, PROFILE.node
    by_time = CAPACITY.decode(KV_TOKENS, NUM_PAGES)
    assert by_time.step_s == pytest.approx(SLO.itl_s)
    request_s = forward.e + forward.f * KV_TOKENS
    assert forward.d + by_time.batch * request_s <= SLO.itl_s < forward.d + (by_time.batch + 1) * request_s
    patient = Capacity(PROFILE, Slo(ttft_s=1.0, itl_s=9.0))
    by_pages = patient.decode(8000.0, NUM_PAGES)
    assert by_pages.batch == int(KV_USE * node.pool_tokens / 8000)
    by_rows = patient.decode(10.0, NUM_PAGES)
    assert by_rows.batch == node.max_running_requests
    many, few = (
        by_time.nodes(100 * by_time.batch / by_time.step_s),
        by_time.nodes(by_time.batch / by_time.step_s),
    )
    assert 100 < many < 108 and 1.1 < few < 1.5, "chance matters less to many nodes"

    chunk = node.chunked_prefill_size
    assert CAPACITY.prefill(chunk, 0).tokens_s == pytest.approx(chunk / forward.extend_s([(0, chunk)]))
    assert CAPACITY.prefill(2 * chunk, chunk).tokens_s == pytest.approx(
        chunk / forward.extend_s([(chunk, chunk)])
    )
    half_s = CAPACITY.prefill(1000, 0).tokens_s / 2
    nodes = [CAPACITY.prefill(tokens, 0).nodes(half_s) for tokens in (100, 2000, 5000, 9000)]
    strict = [Capacity(PROFILE, SLO, share).prefill(3000, 0).nodes(half_s) for share in (0.8, 0.9, 0.95)]
    assert strict == sorted(strict) and strict[0] < strict[-1]
    assert nodes == sorted(nodes) and nodes[0] < nodes[-1], "longer prompts leave less to wait"


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_prompts_wait_no_longer_than_the_use_of_the_nodes_allows(num_nodes: int) -> None:
    """Against a queue before that many servers, of which the formula is an estimate: nine of ten meet the SLO."""
    slo = Slo(ttft_s=0.3, itl_s=0.03)
    capacity = Capacity(PROFILE, slo).prefill(1000, 0)
    service_s, rng = 1000 / capacity.tokens_s, random.Random(0)
    loads = [step / 100 * num_nodes for step in range(1, 100)]
    load = max(one for one in loads if capacity.nodes(one * capacity.tokens_s) <= num_nodes)
    now, free_at, waits = 0.0, [0.0] * num_nodes, []
    for _ in range(20_000):
        now += rng.expovariate(load / service_s)
        done_at = max(now, heapq.heappop(free_at)) + service_s
        heapq.heappush(free_at, done_at)
        waits.append(done_at - now)
    share = sum(wait <= slo.ttft_s for wait in waits) / len(waits)
    assert GOOD_SHARE - 0.03 <= share <= GOOD_SHARE + 0.08, (load, share)


def test_a_node_whose_drain_fails_late_is_none_that_was_asked_for() -> None:
    """More nodes were asked for meanwhile: all of them still come."""
    pace = Pace(start_s=20.0, settle_s=10.0, window_s=60.0)
    autoscaler = Autoscaler(Role.PREFILL, NodeBounds(1, 8), pace, CAPACITY)
    nodes = tuple(NodeSeen(node_id=f"n{i}", state=NodeState.LIVE) for i in range(3))

    def decide(now: float, prompt_tokens_s: float) -> Add | Drain | None:
        work = Work(prompt_tokens_s=prompt_tokens_s, tokens_per_prompt=PROMPT)
        return autoscaler.decide(now, FleetSeen(nodes=nodes, work=work)).action

    now, drained = 0.0, None
    while drained is None:
        now += pace.interval_s
        drained = decide(now, 0.0)
    assert isinstance(drained, Drain)
    now += 2 * pace.settle_s
    assert isinstance(decide(now, 6 * PREFILL.tokens_s), Add)
    autoscaler.drain_failed(drained.node_id)
    assert decide(now + pace.interval_s, 6 * PREFILL.tokens_s) is None
