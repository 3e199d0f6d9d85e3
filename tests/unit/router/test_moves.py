"""A running sequence moves to another decode node; what fails on the way leaves it where it was."""

from __future__ import annotations

import pytest

from router.dispatch.policy import ttft
from router.dispatch.running_req import TRIAL_TOKENS, RunningReq
from shared.protocol.logprobs import LogprobParams, Logprobs
from shared.protocol.messages import (
    Cancel,
    Decode,
    Failed,
    Finish,
    Load,
    Move,
    NodeLimits,
    ReqKey,
    TokenEntry,
)
from tests.unit.router.dispatched import IDS, FakeNode, Fleet
from tests.unit.router.test_failover import decode_of, kill, latest


class Moving:
    """A sequence with two tokens that is on its way from `source` to `target`."""

    def __init__(self, **params: object) -> None:
        self.fleet = Fleet(2)
        self.dispatcher = self.fleet.dispatcher
        self.logprobs = "logprobs" in params
        self.req: RunningReq = self.fleet.start(**params)
        self.source = decode_of(self.req)
        (self.target,) = (node for node in self.fleet.decodes if node is not self.source)
        self.key = self.req.key
        self.tell(self.source, self.key, 0, 10, 11)
        self.dispatcher.move_held(self.source)
        assert self.req.moving is not None
        self.to_key = self.req.moving.key

    def tell(
        self,
        node: FakeNode,
        key: ReqKey,
        position: int,
        *ids: int,
        finish: Finish | None = None,
        bare: bool = False,
    ) -> None:
        logprobs = Logprobs(bytes(4 * len(ids))) if self.logprobs and not bare else None
        self.dispatcher.on_tokens(node, [TokenEntry(key, position, ids, finish, logprobs=logprobs)])

    @property
    def stays(self) -> bool:
        return self.req.moving is None and self.req.key == self.key and not self.req.ended


def test_both_nodes_are_told() -> None:
    moving = Moving()
    decode, move = latest(moving.target, Decode), latest(moving.source, Move)
    assert isinstance(decode, Decode) and isinstance(move, Move)
    assert decode.moving and decode.prefill == moving.source.ref and decode.key == moving.to_key
    assert (decode.work.input_ids, decode.work.output_ids) == (IDS, (10, 11))
    assert (move.key, move.to_key, move.target) == (moving.key, moving.to_key, moving.target.ref)
    assert [moving.fleet.view.seqs.of(n) for n in (moving.source, moving.target)] == [1, 1]


def test_the_next_move_is_to_another_node_than_the_one_that_refused() -> None:
    """A target needs more pages than the router knows of, so the node that refuses may still look like the best."""
    fleet = Fleet(3, decode=ttft)
    req = fleet.start()
    source = decode_of(req)
    others = [node for node in fleet.decodes if node is not source]
    others[1].load = Load(num_running=20)
    for node in (others[0], others[1], others[0]):
        fleet.dispatcher.on_tokens(source, [TokenEntry(req.key, len(req.output_ids), (10,))])
        fleet.dispatcher.move_held(source)
        assert req.moving is not None and req.moving.nodes == (node,)
        fleet.dispatcher.on_failed(node, Failed(req.moving.key, 503, "no room"))
        fleet.wait(60)


def test_each_position_is_sent_once() -> None:
    moving = Moving()
    req = moving.req
    moving.tell(moving.source, moving.key, 2, 12)
    moving.tell(moving.target, moving.to_key, 2, 12, 13)  # what the source has sent since, and one on its way
    assert req.take() == [10, 11, 12, 13] and req.key == moving.to_key
    assert Cancel(moving.key) in moving.source.sent
    moving.tell(moving.source, moving.key, 3, 13)
    assert req.take() == []
    moving.tell(moving.target, moving.to_key, 4, 14, finish=Finish("length"))
    assert req.take() == [14] and req.ended
    assert [moving.fleet.view.seqs.of(n) for n in (moving.source, moving.target)] == [0, 0]


@pytest.mark.parametrize("how", ["moved", "failed over"])
def test_a_part_of_a_stay_does_not_tell_how_long_sequences_stay(how: str) -> None:
    """Of the wait for a place, which is estimated from whole stays."""
    moving = Moving()
    fleet, req, node = moving.fleet, moving.req, moving.target
    fleet.wait(1)
    if how == "moved":
        moving.tell(node, moving.to_key, 2, 12)
    else:
        kill(fleet, moving.source)
        fleet.wait(1)
        moving.tell(node, req.key, 2, 12)
    fleet.wait(1)
    moving.tell(node, req.key, 3, 13, finish=Finish("length"))
    assert req.ended
    node.limits = NodeLimits(context_length=5000, max_total_num_tokens=5000, max_running_requests=1)
    fleet.decodes[:] = [node]
    for stay_s in (10, 0):
        other = fleet.start()
        moving.tell(node, other.key, 0, 10)
        fleet.wait(stay_s)
        if stay_s:
            moving.tell(node, other.key, 1, 11, finish=Finish("length"))
    assert fleet.view.place_wait_s(node, 1, 0.0) == pytest.approx(10)


def test_logprobs_come_from_the_node_that_computed_them() -> None:
    moving = Moving(logprobs=LogprobParams())
    req = moving.req
    moving.tell(moving.target, moving.to_key, 2, 12, 13, bare=True)
    moving.tell(moving.target, moving.to_key, 4, 14)
    assert req.take() == [10, 11] and req.awaits_left
    moving.tell(moving.source, moving.key, 2, 12, 13)
    assert req.take() == [12, 13, 14] and not req.awaits_left
    assert len(req.take_logprobs(0, 5)) == 5


def test_a_sequence_waits_for_the_last_tokens_of_its_source_before_it_moves_again() -> None:
    moving = Moving(logprobs=LogprobParams(), max_new_tokens=50)
    moving.tell(moving.target, moving.to_key, 2, 12, 13, bare=True)
    moving.dispatcher.move_held(moving.target)
    assert moving.req.moving is None
    moving.tell(moving.source, moving.key, 2, 12, 13)
    moving.dispatcher.move_held(moving.target)
    assert moving.req.moving is not None


def test_a_failover_awaits_no_tokens_of_an_earlier_source() -> None:
    moving = Moving(logprobs=LogprobParams())
    moving.tell(moving.target, moving.to_key, 2, 12, 13, bare=True)
    kill(moving.fleet, moving.target)
    assert not moving.req.awaits_left


def test_a_source_that_dies_before_its_last_tokens_came_makes_a_failover() -> None:
    moving = Moving(logprobs=LogprobParams())
    moving.tell(moving.target, moving.to_key, 2, 12, 13, bare=True)
    kill(moving.fleet, moving.source)
    assert moving.req.key.attempt == 2 and Cancel(moving.to_key) in moving.target.sent
    message = latest(decode_of(moving.req), Decode)
    assert isinstance(message, Decode) and message.work.output_ids == (10, 11)


def test_a_source_that_dies_afterwards_does_not_matter() -> None:
    moving = Moving()
    moving.tell(moving.target, moving.to_key, 2, 12, 13)
    kill(moving.fleet, moving.source)
    assert moving.req.key == moving.to_key


def test_a_source_that_dies_on_the_way_makes_a_failover() -> None:
    moving = Moving()
    kill(moving.fleet, moving.source)
    assert moving.req.key.attempt == 2 and moving.req.moving is None
    assert Cancel(moving.to_key) in moving.target.sent
    moving.tell(moving.target, moving.to_key, 2, 99)
    assert moving.req.take() == [10, 11], "the attempt of the move has ended"
    assert moving.fleet.view.seqs.of(moving.target) == 1


@pytest.mark.parametrize("culprit", ["source", "target"])
def test_a_failure_leaves_it_where_it_is(culprit: str) -> None:
    moving = Moving()
    node, other = moving.source, moving.target
    if culprit == "target":
        node, other = other, node
    moving.dispatcher.on_failed(node, Failed(moving.to_key, 503, "no room"))
    assert moving.stays and Cancel(moving.to_key) in other.sent and Cancel(moving.to_key) not in node.sent
    moving.tell(moving.source, moving.key, 2, 12)
    assert moving.req.take() == [10, 11, 12]
    assert [moving.fleet.view.seqs.of(n) for n in (moving.source, moving.target)] == [1, 0]


def test_a_target_that_dies_leaves_it_where_it_is() -> None:
    moving = Moving()
    kill(moving.fleet, moving.target)
    assert moving.stays and Cancel(moving.to_key) in moving.source.sent


def test_a_move_that_failed_is_tried_again_after_a_pause() -> None:
    moving = Moving()
    moving.dispatcher.on_failed(moving.target, Failed(moving.to_key, 503, "no room"))
    moving.dispatcher.move_held(moving.source)
    assert moving.req.moving is None
    moving.fleet.wait(1)
    moving.dispatcher.move_held(moving.source)
    assert moving.req.moving is not None and moving.req.moving.key not in (moving.key, moving.to_key)


def test_targets_that_crash_are_not_followed_by_others() -> None:
    fleet = Fleet(6)
    req = fleet.start(max_new_tokens=500)
    fleet.dispatcher.on_tokens(decode_of(req), [TokenEntry(req.key, 0, (1,))])
    source = decode_of(req)
    fleet.dispatcher.move_held(source)
    assert req.moving is not None
    target = req.moving.nodes[0]
    assert isinstance(target, FakeNode)
    kill(fleet, target)
    fleet.wait(60)
    fleet.dispatcher.move_held(source)
    assert req.moving is None and req.failover.crashed == {target.ref.incarnation}
    fleet.dispatcher.on_tokens(source, [TokenEntry(req.key, 1, tuple(range(TRIAL_TOKENS)))])
    fleet.dispatcher.move_held(source)
    assert req.moving is not None, "it has passed the place of the crash"


def test_pauses_between_moves_that_fail_grow() -> None:
    moving = Moving()
    num_failed = 0
    for _ in range(100):
        if moving.req.moving is not None:
            moving.dispatcher.on_failed(moving.target, Failed(moving.req.moving.key, 503, "no room"))
            num_failed += 1
        moving.fleet.wait(0.5)
        moving.dispatcher.move_held(moving.source)
    assert num_failed < 10


def test_a_move_that_arrives_makes_the_next_pause_short_again() -> None:
    moving = Moving(max_new_tokens=50)
    moving.dispatcher.on_failed(moving.target, Failed(moving.to_key, 503, "no room"))
    moving.fleet.wait(1)
    moving.dispatcher.move_held(moving.source)
    assert moving.req.moving is not None
    moving.tell(moving.target, moving.req.moving.key, 2, 12)
    moving.dispatcher.move_held(moving.target)
    assert moving.req.moving is not None
    moving.dispatcher.on_failed(moving.source, Failed(moving.req.moving.key, 503, "no room"))
    moving.fleet.wait(0.6)
    moving.dispatcher.move_held(moving.target)
    assert moving.req.moving is not None


def test_a_suspect_does_not_move_and_no_other_moves_to_its_node() -> None:
    fleet = Fleet(4)
    suspect = fleet.start(max_new_tokens=500)
    for _ in range(2):
        kill(fleet, decode_of(suspect))
        fleet.wait(1)
    trial = decode_of(suspect)
    fleet.dispatcher.on_tokens(trial, [TokenEntry(suspect.key, 0, (1,))])
    req = fleet.start(max_new_tokens=500)
    source = decode_of(req)
    fleet.dispatcher.on_tokens(source, [TokenEntry(req.key, 0, (1,))])
    assert source is not trial
    fleet.decodes.remove(source)  # it is drained
    fleet.dispatcher.move_held(trial)
    fleet.dispatcher.move_held(source)
    assert suspect.moving is None and req.moving is None


def test_a_sequence_that_ends_at_the_source_is_cancelled_at_the_target() -> None:
    moving = Moving()
    moving.tell(moving.source, moving.key, 2, 12, finish=Finish("length"))
    assert moving.req.ended and Cancel(moving.to_key) in moving.target.sent
    assert moving.fleet.view.seqs.of(moving.target) == 0


def test_a_client_that_goes_is_told_to_both() -> None:
    moving = Moving()
    moving.dispatcher.release(moving.req)
    assert Cancel(moving.key) in moving.source.sent and Cancel(moving.to_key) in moving.target.sent


def test_moved_makes_the_target_the_holder() -> None:
    moving = Moving()
    moving.dispatcher.on_moved(moving.source, moving.key)
    assert moving.req.key == moving.to_key and moving.req.attempt.holders == [moving.target]
    kill(moving.fleet, moving.source)
    assert moving.req.key == moving.to_key
    kill(moving.fleet, moving.target)
    assert moving.req.key.attempt == 2, "it is a failover as any"


def test_a_target_that_failed_before_moved_came_makes_a_failover() -> None:
    moving = Moving()
    moving.dispatcher.on_failed(moving.target, Failed(moving.to_key, 503, "digest"))
    moving.dispatcher.on_moved(moving.source, moving.key)
    assert moving.req.key.attempt == 2 and moving.req.nodes


def test_only_what_streams_there_moves() -> None:
    fleet = Fleet(2)
    req = fleet.start()
    node = decode_of(req)
    fleet.dispatcher.move_held(node)
    assert req.moving is None, "its prompt is not computed"


def test_a_target_needs_room_for_all_that_was_promised() -> None:
    fleet = Fleet(2)
    req = fleet.start(max_new_tokens=50)
    source = decode_of(req)
    (other,) = (node for node in fleet.decodes if node is not source)
    other.limits = NodeLimits(len(IDS) + 49, 65_536, 64)
    fleet.dispatcher.on_tokens(source, [TokenEntry(req.key, 0, (1,))])
    fleet.dispatcher.on_move_wanted(source, [req.key])
    assert req.moving is None
    other.limits = NodeLimits(len(IDS) + 50, 65_536, 64)
    fleet.dispatcher.on_move_wanted(source, [req.key])
    assert req.moving is not None


def test_a_few_at_a_time() -> None:
    fleet = Fleet(2)
    reqs = [fleet.start() for _ in range(30)]
    source = fleet.decodes[0]
    for req in reqs:
        fleet.dispatcher.on_tokens(decode_of(req), [TokenEntry(req.key, 0, (1,))])
    fleet.dispatcher.move_held(source)
    fleet.dispatcher.move_held(source)
    assert sum(req.moving is not None for req in reqs) == 8


def test_a_sequence_can_move_twice() -> None:
    moving = Moving(max_new_tokens=50)
    moving.tell(moving.target, moving.to_key, 2, 12)
    moving.dispatcher.move_held(moving.target)
    assert moving.req.moving is not None and moving.req.moving.nodes == (moving.source,)


def test_a_node_is_not_empty_while_a_sequence_moves_to_it() -> None:
    moving = Moving()
    assert moving.dispatcher.num_held(moving.target) == 1
    moving.tell(moving.target, moving.to_key, 2, 12)
    assert [moving.dispatcher.num_held(node) for node in (moving.source, moving.target)] == [0, 1]


def test_a_move_to_a_node_whose_time_is_up_is_given_up() -> None:
    moving = Moving()
    moving.dispatcher.fail_over_held(moving.target, "its time is up")
    assert moving.stays and moving.dispatcher.num_held(moving.target) == 0
    assert Cancel(moving.to_key) in moving.source.sent and Cancel(moving.to_key) in moving.target.sent


def test_a_sequence_that_left_by_an_earlier_move_is_not_awaited_at_the_target_of_the_next() -> None:
    moving = Moving()
    moving.dispatcher.on_failed(moving.target, Failed(moving.to_key, 503, "it stops"))
    moving.fleet.wait(1)
    moving.dispatcher.move_held(moving.source)
    assert moving.req.moving is not None
    second = moving.req.moving.key
    moving.dispatcher.on_moved(moving.source, moving.key)  # by the first move
    moving.dispatcher.on_failed(moving.source, Failed(second, 503, "it does not run on this node"))
    assert moving.req.key.attempt == 3 and moving.req.nodes and Cancel(second) in moving.target.sent
