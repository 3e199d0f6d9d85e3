"""A request that is sent again goes on behind the tokens that have arrived, as the same request."""

from __future__ import annotations

import pytest

from router.dispatch.running_req import RunningReq
from shared.protocol.logprobs import LogprobParams, Logprobs
from shared.protocol.messages import Cancel, Decode, Failed, Finish, NodeLimits, Prefill, TokenEntry
from tests.unit.router.dispatched import IDS, FakeNode, Fleet


class Resent:
    """A request that one node began alone, because it holds the prompt, and then gave back after two tokens."""

    def __init__(self, **params: object) -> None:
        self.fleet = Fleet(2)
        self.first, self.other = self.fleet.decodes
        self.first.holds(4)
        self.req = self.fleet.start(**params)
        self.first_key = self.req.key
        self.tell(self.first, 0, (10, 11))

    def tell(self, node: FakeNode, position: int, ids: tuple[int, ...], finish: Finish | None = None) -> None:
        self.fleet.dispatcher.on_tokens(node, [TokenEntry(self.req.key, position, ids, finish)])

    def give_back(self) -> None:
        self.fleet.dispatcher.on_not_cached(self.first, self.req.key)

    @property
    def sent(self) -> tuple[Prefill, Decode]:
        """The messages of the latest attempt."""
        prefill = self.fleet.prefills[0].sent[-1]
        (decode,) = (
            message
            for node in self.fleet.decodes
            for message in node.sent
            if isinstance(message, Decode) and message.key == self.req.key
        )
        assert isinstance(prefill, Prefill)
        return prefill, decode


def test_the_next_attempt_begins_behind_what_has_arrived() -> None:
    resent = Resent()
    assert resent.req.take() == [10, 11]
    resent.give_back()
    prefill, decode = resent.sent
    assert (prefill.key, decode.key) == (resent.req.key, resent.req.key)
    assert (resent.req.key.rid, resent.req.key.attempt) == (resent.first_key.rid, 1)
    assert prefill.work == decode.work
    assert (decode.work.input_ids, decode.work.output_ids) == (IDS, (10, 11))
    assert decode.work.params == resent.req.work.params
    node = resent.req.nodes[-1]
    assert isinstance(node, FakeNode)
    resent.tell(node, 2, (12, 13), Finish("length"))
    assert resent.req.take() == [12, 13]
    assert resent.req.ended and resent.req.output_ids == [10, 11, 12, 13]


def test_messages_of_the_earlier_attempt_are_dropped() -> None:
    resent = Resent()
    resent.give_back()
    dispatcher = resent.fleet.dispatcher
    dispatcher.on_tokens(resent.first, [TokenEntry(resent.first_key, 2, (5, 6), Finish("length"))])
    dispatcher.on_failed(resent.first, Failed(resent.first_key, 500, "late"))
    dispatcher.on_not_cached(resent.first, resent.first_key)
    assert not resent.req.ended
    assert (resent.req.key.attempt, resent.req.output_ids) == (1, [10, 11])


def test_a_late_failure_of_a_node_that_has_let_go_does_not_end_the_stream() -> None:
    """The decode node speaks, so it has the pages: what the prefill node says of the request later is history."""
    fleet = Fleet(1)
    req = fleet.start()
    prefill, decode = req.nodes
    fleet.dispatcher.on_tokens(decode, [TokenEntry(req.key, 0, (10,), None)])
    fleet.dispatcher.on_failed(prefill, Failed(req.key, 503, "link lost"))
    assert not req.ended
    fleet.dispatcher.on_tokens(decode, [TokenEntry(req.key, 1, (11,), Finish("length"))])
    assert (req.output_ids, req.error) == ([10, 11], None)


def test_max_new_tokens_is_clipped_once() -> None:
    """A later attempt gets as many as the first was promised, though its nodes have room for more."""
    fleet = Fleet(1)
    (decode,) = fleet.decodes
    decode.holds(4)
    decode.limits = NodeLimits(len(IDS) + 6, len(IDS) + 6, 64)
    req = fleet.start(max_new_tokens=50, min_new_tokens=20)
    decode.limits = NodeLimits(65_536, 65_536, 64)
    fleet.dispatcher.on_not_cached(decode, req.key)
    first, second = (message for message in decode.sent if isinstance(message, Decode))
    assert first.work == second.work == req.work
    assert (first.work.params.max_new_tokens, first.work.params.min_new_tokens) == (6, 6)


def test_a_later_attempt_goes_to_a_node_with_room_for_all_that_was_promised() -> None:
    resent = Resent(max_new_tokens=50)
    resent.first.limits = NodeLimits(len(IDS) + 49, 65_536, 64)
    resent.other.limits = NodeLimits(len(IDS) + 50, 65_536, 64)
    resent.give_back()
    assert resent.req.nodes[-1] is resent.other


def test_without_such_a_node_the_request_ends_after_its_time() -> None:
    resent = Resent(max_new_tokens=50)
    for node in resent.fleet.decodes:
        node.limits = NodeLimits(len(IDS) + 49, 65_536, 64)
    resent.give_back()
    resent.fleet.wait(29)
    assert not resent.req.ended
    resent.fleet.wait(2)
    assert resent.req.error is not None
    assert (resent.req.error.status, resent.req.error.code) == (503, "no_node")
    assert f"room for {len(IDS) + 50} tokens; the largest has {len(IDS) + 49}" in resent.req.error.message
    assert resent.fleet.view.seqs.of(resent.first) == 0


def test_logprobs_of_tokens_that_the_next_attempt_tells() -> None:
    fleet = Fleet(1)
    (decode,) = fleet.decodes
    decode.holds(5)
    req = fleet.start(logprobs=LogprobParams())

    def tell(position: int, values: bytes) -> None:
        num = len(values) // 4
        told = TokenEntry(req.key, position, (7,) * num, logprobs=Logprobs(values))
        fleet.dispatcher.on_tokens(decode, [told])

    tell(0, bytes(4))
    fleet.dispatcher.on_not_cached(decode, req.key)
    tell(1, b"\0\0\x80\xbf" * 2)  # -1.0
    assert [known.logprob for known in logprobs_of(req)] == [0.0, -1.0, -1.0]


def logprobs_of(req: RunningReq) -> list:  # type: ignore[type-arg]
    return req.take_logprobs(0, len(req.take()))


@pytest.mark.parametrize("held", [0, 5])
def test_an_attempt_at_the_last_token_needs_no_decode_node(held: int) -> None:
    fleet = Fleet(1)
    (decode,) = fleet.decodes
    decode.holds(4)
    req = fleet.start(max_new_tokens=3)
    decode.holds(held)
    fleet.dispatcher.on_tokens(decode, [TokenEntry(req.key, 0, (1, 2))])
    fleet.dispatcher.on_not_cached(decode, req.key)
    (message,) = fleet.prefills[0].sent
    assert isinstance(message, Prefill)
    assert (message.decode, message.work.output_ids) == (None, (1, 2))
    assert req.nodes == tuple(fleet.prefills)
    assert not any(isinstance(message, Cancel) for message in decode.sent), (
        "it has said that it holds nothing"
    )
