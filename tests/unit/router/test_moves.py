"""A running sequence moves to another decode node; what fails on the way leaves it where it was."""

from __future__ import annotations

import pytest

from router.dispatch.running_req import TRIAL_TOKENS, RunningReq
from shared.protocol.logprobs import LogprobParams, Logprobs
from shared.protocol.messages import Cancel, Decode, Finish, Load, Move, NodeLimits
from tests.unit.router.dispatched import IDS, SeenFleet, SeenNode, decode_of

LENGTH = Finish("length")


class Moving:
    """A sequence with two tokens that is on its way from `source` to `target`."""

    def __init__(self, **params: object) -> None:
        self.fleet = SeenFleet(2)
        self.dispatcher = self.fleet.dispatcher
        self.logprobs = "logprobs" in params
        self.req: RunningReq = self.fleet.start(**params)
        self.source = decode_of(self.req)
        (self.target,) = (node for node in self.fleet.decodes if node is not self.source)
        self.key = self.req.key
        self.from_source(0, 10, 11)
        self.dispatcher.move_held(self.source)
        assert self.req.moving is not None
        self.to_key = self.req.moving.key

    def from_source(self, position: int, *ids: int, finish: Finish | None = None) -> None:
        self._tell(self.source, position, ids, key=self.key, finish=finish)

    def from_target(
        self, position: int, *ids: int, finish: Finish | None = None, knows_logprobs: bool = True
    ) -> None:
        self._tell(self.target, position, ids, key=self.to_key, finish=finish, known=knows_logprobs)

    def _tell(
        self, by: SeenNode, at: int, ids: tuple[int, ...], known: bool = True, **fields: object
    ) -> None:
        logprobs = Logprobs(bytes(4 * len(ids))) if self.logprobs and known else None
        self.fleet.tell(self.req, *ids, by=by, at=at, logprobs=logprobs, **fields)

    def fails(self, node: SeenNode) -> None:
        """The move that is under way."""
        assert self.req.moving is not None
        self.fleet.fail(self.req, node, 503, key=self.req.moving.key)

    def again(self, after_s: float = 1.0) -> bool:
        """Whether the sequence moves away from the node that it is on, when so much time has passed."""
        self.fleet.wait(after_s)
        self.dispatcher.move_held(decode_of(self.req))
        return self.req.moving is not None

    @property
    def stays(self) -> bool:
        return self.req.moving is None and self.req.key == self.key and not self.req.ended

    @property
    def seqs(self) -> list[int]:
        """On the source, and on the target."""
        return [self.fleet.view.seqs.of(node) for node in (self.source, self.target)]


def started(fleet: SeenFleet, **params: object) -> tuple[RunningReq, SeenNode]:
    """A sequence with one token, and its node."""
    req = fleet.start(**params)  # type: ignore[arg-type]
    fleet.tell(req, 1)
    return req, decode_of(req)


# ------------------------------------------------------------------------------------------ a move
def test_both_nodes_are_told() -> None:
    moving = Moving()
    decode, move = moving.target.last(Decode), moving.source.last(Move)
    assert decode.moving and decode.prefill == moving.source.ref and decode.key == moving.to_key
    assert (decode.work.input_ids, decode.work.output_ids) == (IDS, (10, 11))
    assert (move.key, move.to_key, move.target) == (moving.key, moving.to_key, moving.target.ref)
    assert moving.seqs == [1, 1]


def test_each_position_is_sent_once() -> None:
    moving = Moving()
    req = moving.req
    moving.from_source(2, 12)
    moving.from_target(2, 12, 13)  # what the source has sent since, and one on its way
    assert req.take() == [10, 11, 12, 13] and req.key == moving.to_key
    assert Cancel(moving.key) in moving.source.sent
    moving.from_source(3, 13)
    assert req.take() == []
    moving.from_target(4, 14, finish=LENGTH)
    assert req.take() == [14] and req.ended and moving.seqs == [0, 0]


def test_moved_makes_the_target_the_holder() -> None:
    moving = Moving()
    moving.dispatcher.on_moved(moving.source, moving.key)
    assert moving.req.key == moving.to_key and moving.req.attempt.holders == [moving.target]
    moving.fleet.kill(moving.source)
    assert moving.req.key == moving.to_key, "it does not matter any more"
    moving.fleet.kill(moving.target)
    assert moving.req.key.attempt == 2, "it is a failover as any"


def test_a_node_is_not_empty_while_a_sequence_moves_to_it() -> None:
    moving = Moving()
    assert moving.dispatcher.num_held(moving.target) == 1
    moving.from_target(2, 12)
    assert [moving.dispatcher.num_held(node) for node in (moving.source, moving.target)] == [0, 1]


def test_a_sequence_can_move_twice() -> None:
    moving = Moving(max_new_tokens=50)
    moving.from_target(2, 12)
    assert moving.again(0)
    assert moving.req.moving is not None and moving.req.moving.nodes == (moving.source,)


@pytest.mark.parametrize("how", ["moved", "failed over"])
def test_a_part_of_a_stay_does_not_tell_how_long_sequences_stay(how: str) -> None:
    """Of the wait for a place, which is estimated from whole stays."""
    moving = Moving()
    fleet, req, node = moving.fleet, moving.req, moving.target
    fleet.wait(1)
    if how == "failed over":
        fleet.kill(moving.source)
        fleet.wait(1)
    fleet.tell(req, 12, by=node, key=moving.to_key if how == "moved" else req.key)
    fleet.wait(1)
    fleet.tell(req, 13, finish=LENGTH)
    assert req.ended
    node.limits = NodeLimits(context_length=5000, max_total_num_tokens=5000, max_running_requests=1)
    fleet.decodes[:] = [node]
    for stay_s in (10, 0):
        other, _ = started(fleet)
        fleet.wait(stay_s)
        if stay_s:
            fleet.tell(other, 11, finish=LENGTH)
    assert fleet.view.place_wait_s(node, 1, 0.0) == pytest.approx(10)


# ---------------------------------------------------------------------------------------- logprobs
def test_logprobs_come_from_the_node_that_computed_them() -> None:
    moving = Moving(logprobs=LogprobParams())
    req = moving.req
    moving.from_target(2, 12, 13, knows_logprobs=False)
    moving.from_target(4, 14)
    assert req.take() == [10, 11] and req.awaits_left
    moving.from_source(2, 12, 13)
    assert req.take() == [12, 13, 14] and not req.awaits_left
    assert len(req.take_logprobs(0, 5)) == 5


def test_a_sequence_waits_for_the_last_tokens_of_its_source_before_it_moves_again() -> None:
    moving = Moving(logprobs=LogprobParams(), max_new_tokens=50)
    moving.from_target(2, 12, 13, knows_logprobs=False)
    assert not moving.again(0)
    moving.from_source(2, 12, 13)
    assert moving.again(0)


def test_a_failover_awaits_no_tokens_of_an_earlier_source() -> None:
    moving = Moving(logprobs=LogprobParams())
    moving.from_target(2, 12, 13, knows_logprobs=False)
    moving.fleet.kill(moving.target)
    assert not moving.req.awaits_left


def test_a_source_that_dies_before_its_last_tokens_came_makes_a_failover() -> None:
    moving = Moving(logprobs=LogprobParams())
    moving.from_target(2, 12, 13, knows_logprobs=False)
    moving.fleet.kill(moving.source)
    assert moving.req.key.attempt == 2 and Cancel(moving.to_key) in moving.target.sent
    assert decode_of(moving.req).last(Decode).work.output_ids == (10, 11)


# --------------------------------------------------------------------------------------- what fails
def test_a_source_that_dies_on_the_way_makes_a_failover() -> None:
    moving = Moving()
    moving.fleet.kill(moving.source)
    assert moving.req.key.attempt == 2 and moving.req.moving is None
    assert Cancel(moving.to_key) in moving.target.sent
    moving.from_target(2, 99)
    assert moving.req.take() == [10, 11], "the attempt of the move has ended"
    assert moving.fleet.view.seqs.of(moving.target) == 1


@pytest.mark.parametrize("culprit", ["source", "target"])
def test_a_failure_leaves_it_where_it_is(culprit: str) -> None:
    moving = Moving()
    node, other = moving.source, moving.target
    if culprit == "target":
        node, other = other, node
    moving.fails(node)
    assert moving.stays and Cancel(moving.to_key) in other.sent and Cancel(moving.to_key) not in node.sent
    moving.from_source(2, 12)
    assert moving.req.take() == [10, 11, 12] and moving.seqs == [1, 0]


@pytest.mark.parametrize("how", ["dies", "has to be empty"])
def test_a_target_that_goes_leaves_it_where_it_is(how: str) -> None:
    moving = Moving()
    if how == "dies":
        moving.fleet.kill(moving.target)
    else:
        moving.dispatcher.fail_over_held(moving.target, "its time is up")
        assert Cancel(moving.to_key) in moving.target.sent
    assert moving.stays and Cancel(moving.to_key) in moving.source.sent
    assert moving.dispatcher.num_held(moving.target) == 0


def test_a_move_that_failed_is_tried_again_after_a_pause() -> None:
    moving = Moving()
    moving.fails(moving.target)
    assert not moving.again(0) and moving.again(1)
    assert moving.req.moving is not None and moving.req.moving.key not in (moving.key, moving.to_key)


def test_pauses_between_moves_that_fail_grow() -> None:
    moving = Moving()
    num_failed = 0
    for _ in range(100):
        if moving.req.moving is not None:
            moving.fails(moving.target)
            num_failed += 1
        moving.again(0.5)
    assert num_failed == 8, "after 0.5, 1, 2, 4, 8, 16 and 16 s"


def test_a_move_that_arrives_makes_the_next_pause_short_again() -> None:
    moving = Moving(max_new_tokens=50)
    moving.fails(moving.target)
    assert moving.again() and moving.req.moving is not None
    moving.fleet.tell(moving.req, 12, by=moving.target, key=moving.req.moving.key)
    assert moving.again(0)
    moving.fails(moving.source)
    assert moving.again(0.6)


def test_the_next_move_is_to_another_node_than_the_one_that_refused() -> None:
    """A target needs more pages than the router knows of, so the node that refuses may still look like the best."""
    fleet = SeenFleet(3, decode="ttft")
    req, source = started(fleet)
    others = [node for node in fleet.decodes if node is not source]
    others[1].load = Load(num_running=20)
    for node in (others[0], others[1], others[0]):
        fleet.tell(req, 10)
        fleet.dispatcher.move_held(source)
        assert req.moving is not None and req.moving.nodes == (node,)
        fleet.fail(req, node, 503, key=req.moving.key)
        fleet.wait(60)


def test_targets_that_crash_are_not_followed_by_others() -> None:
    fleet = SeenFleet(6)
    req, source = started(fleet, max_new_tokens=500)
    fleet.dispatcher.move_held(source)
    assert req.moving is not None
    target = req.moving.nodes[0]
    fleet.kill(target)
    fleet.wait(60)
    fleet.dispatcher.move_held(source)
    assert req.moving is None and req.failover.crashed == {target.ref.incarnation}
    fleet.tell(req, *range(TRIAL_TOKENS))
    fleet.dispatcher.move_held(source)
    assert req.moving is not None, "it has passed the place of the crash"


def test_a_suspect_does_not_move_and_no_other_moves_to_its_node() -> None:
    fleet = SeenFleet(4)
    suspect = fleet.start(max_new_tokens=500)
    for _ in range(2):
        fleet.kill(decode_of(suspect))
        fleet.wait(1)
    trial = decode_of(suspect)
    fleet.tell(suspect, 1)
    req, source = started(fleet, max_new_tokens=500)
    assert source is not trial
    fleet.decodes.remove(source)  # it is drained
    fleet.dispatcher.move_held(trial)
    fleet.dispatcher.move_held(source)
    assert suspect.moving is None and req.moving is None


def test_a_target_that_failed_before_moved_came_makes_a_failover() -> None:
    moving = Moving()
    moving.fails(moving.target)
    moving.dispatcher.on_moved(moving.source, moving.key)
    assert moving.req.key.attempt == 2 and moving.req.nodes


def test_a_sequence_that_left_by_an_earlier_move_is_not_awaited_at_the_target_of_the_next() -> None:
    moving = Moving()
    moving.fails(moving.target)
    assert moving.again() and moving.req.moving is not None
    second = moving.req.moving.key
    moving.dispatcher.on_moved(moving.source, moving.key)  # by the first move
    moving.fleet.fail(moving.req, moving.source, 503, key=second)
    assert moving.req.key.attempt == 3 and moving.req.nodes and Cancel(second) in moving.target.sent


def test_a_target_that_lies_ends_the_move_and_not_the_stream() -> None:
    moving = Moving()
    moving.from_target(2, -1)
    assert moving.stays and Cancel(moving.to_key) in moving.target.sent
    moving.from_source(2, *[6] * 6, finish=LENGTH)
    assert moving.req.finish == LENGTH and moving.req.output_ids == [10, 11, *[6] * 6]


@pytest.mark.parametrize("awaited", [True, False])
def test_a_source_that_lies_after_the_move_counts_where_its_tokens_are_awaited(awaited: bool) -> None:
    moving = Moving(logprobs=LogprobParams())
    moving.from_target(2, *[12] * awaited, knows_logprobs=False)
    assert moving.req.key == moving.to_key and moving.req.awaits_left is awaited
    moving.from_source(2, -1)
    assert (moving.req.key == moving.to_key) is not awaited and not moving.req.ended


@pytest.mark.parametrize("known", [False, True])
def test_a_target_may_lack_logprobs_in_its_first_message_alone(known: bool) -> None:
    moving = Moving(logprobs=LogprobParams())
    moving.from_target(2, knows_logprobs=False)
    moving.from_target(2, 12, knows_logprobs=known)
    assert (moving.req.key == moving.to_key) is known and not moving.req.ended


# --------------------------------------------------------------------------------- how a sequence ends
def test_a_sequence_that_ends_at_the_source_is_cancelled_at_the_target() -> None:
    moving = Moving()
    moving.from_source(2, 12, finish=LENGTH)
    assert moving.req.ended and Cancel(moving.to_key) in moving.target.sent
    assert moving.fleet.view.seqs.of(moving.target) == 0


def test_a_client_that_goes_is_told_to_both() -> None:
    moving = Moving()
    moving.dispatcher.release(moving.req)
    assert Cancel(moving.key) in moving.source.sent and Cancel(moving.to_key) in moving.target.sent


# --------------------------------------------------------------------------------------- what moves
def test_only_what_streams_there_moves() -> None:
    fleet = SeenFleet(2)
    req = fleet.start()
    fleet.dispatcher.move_held(decode_of(req))
    assert req.moving is None, "its prompt is not computed"


def test_a_target_needs_room_for_all_that_was_promised() -> None:
    fleet = SeenFleet(2)
    req, source = started(fleet, max_new_tokens=50)
    (other,) = (node for node in fleet.decodes if node is not source)
    for num_places, moves in ((49, False), (50, True)):
        other.limits = NodeLimits(len(IDS) + num_places, 65_536, 64)
        fleet.dispatcher.on_move_wanted(source, [req.key])
        assert (req.moving is not None) is moves


def test_a_few_at_a_time() -> None:
    fleet = SeenFleet(2)
    reqs = [started(fleet)[0] for _ in range(30)]
    for _ in range(2):
        fleet.dispatcher.move_held(fleet.decodes[0])
    assert sum(req.moving is not None for req in reqs) == 8
