"""A node that tells what cannot be: its requests go on at another node, and it gets fewer. No client sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from router.config import DispatchOptions
from router.dispatch.fleet_view import FAILURES_TO_OPEN
from router.dispatch.node import Loss
from router.nodes.member import Refusal, raise_if_impossible
from shared.protocol.logprobs import LogprobParams, Logprobs
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Decode,
    Finish,
    Flush,
    NodeHello,
    NodeRef,
    Prefill,
    ReqReport,
    Role,
    Struct,
    TokenEntry,
)
from tests.patience import eventually
from tests.unit.router.dispatched import IDS, VOCAB_SIZE, SeenFleet
from tests.unit.router.fake_node import LAYOUT, LIMITS, FakeNode, byte_level_tokenizer, tell_story
from tests.unit.router.fakes import joined_router
from tests.unit.router.test_membership import dialled, new_membership

NUM_NEW = 6
ONE, LENGTH = Logprobs(bytes(4), bytes(4), bytes(4)), Finish("length")
WANTED = LogprobParams(start_len=len(IDS) - 3, top_num=1)
INPUTS = Logprobs(bytes(8), bytes(8), bytes(8))


def told(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    return list(entries)


def at(position: int, *ids: int, **fields: Any) -> dict[str, Any]:
    return {"position": position, "token_ids": ids, **fields}


LIES: dict[str, list[dict[str, Any]]] = {
    "a negative id": told(at(0, -1)),
    "a negative id behind others": told(at(0, 5), at(1, 6, 7, -1)),
    "the first id outside": told(at(0, VOCAB_SIZE)),
    "an id beyond 32 bits": told(at(0, 1 << 32)),
    "an id beyond 63 bits": told(at(0, (1 << 64) - 1)),
    "the lowest id": told(at(0, -(1 << 63))),
    "a matched id outside": told(at(0, 5, finish=Finish("stop", VOCAB_SIZE))),
    "a negative matched id": told(at(0, 5, finish=Finish("stop", -1))),
    "a negative position": told(at(-1, 5, 6)),
    "a first position behind the end": told(at(NUM_NEW, 5)),
    "a first position that jumps": told(at(1, 5)),
    "a position that jumps": told(at(0, 5), at(2, 6)),
    "a position beyond 32 bits": told(at(0, 5), at(1 << 40, 6)),
    "a position that goes back": told(at(0, 5, 6, 7), at(1, 6)),
    "the same position again": told(at(0, 5), at(0, 5)),
    "all ids without a finish": told(*(at(i, 5) for i in range(NUM_NEW))),
    "all ids at once without a finish": told(at(0, *[5] * NUM_NEW)),
    "more ids than asked for": told(at(0, *[5] * (NUM_NEW + 1), finish=LENGTH)),
    "a finish without a token": told(at(0, finish=LENGTH)),
    "a late finish without a token": told(at(0, 5), at(1, finish=LENGTH)),
    "a finish ahead of tokens": told(at(0, 5), at(4, 6, finish=LENGTH)),
    "more cached than there is": told(at(0, 5, report=ReqReport(cached_tokens=len(IDS) + 1))),
    "logprobs that were not asked for": told(at(0, 5, logprobs=Logprobs(bytes(4)))),
    "input logprobs that were not asked for": told(at(0, 5, input_logprobs=Logprobs(bytes(4)))),
}
LIES_OF_LOGPROBS: dict[str, list[dict[str, Any]]] = {
    "none": told(at(0, 5, input_logprobs=INPUTS)),
    "none of the prompt": told(at(0, 5, logprobs=ONE)),
    "none later": told(at(0, 5, logprobs=ONE, input_logprobs=INPUTS), at(1, 6)),
    "too few": told(at(0, 5, 6, logprobs=ONE, input_logprobs=INPUTS)),
    "too many": told(at(0, 5, logprobs=INPUTS, input_logprobs=INPUTS)),
    "too many of the prompt": told(at(0, 5, logprobs=ONE, input_logprobs=ONE.followed_by(INPUTS))),
    "too few of the prompt": told(at(0, 5, logprobs=ONE, input_logprobs=ONE)),
    "no likeliest": told(at(0, 5, logprobs=Logprobs(bytes(4)), input_logprobs=INPUTS)),
    "ids that were not asked for": told(
        at(0, 5, logprobs=Logprobs(bytes(4), bytes(4), bytes(4), bytes(4)), input_logprobs=INPUTS)
    ),
    "a negative likeliest": told(
        at(0, 5, logprobs=Logprobs(bytes(4), b"\xff" * 4, bytes(4)), input_logprobs=INPUTS)
    ),
    "a likeliest outside": told(
        at(
            0,
            5,
            logprobs=ONE,
            input_logprobs=Logprobs(bytes(8), VOCAB_SIZE.to_bytes(4, "little") * 2, bytes(8)),
        )
    ),
}
CASES = [
    *(pytest.param(lie, {}, id=name) for name, lie in LIES.items()),
    *(
        pytest.param(lie, {"logprobs": WANTED}, id=f"logprobs: {name}")
        for name, lie in LIES_OF_LOGPROBS.items()
    ),
]


@pytest.mark.parametrize(("lie", "params"), CASES)
@pytest.mark.parametrize("role", Role)
def test_it_is_taken_from_the_node_and_counted(
    role: Role, lie: list[dict[str, Any]], params: dict[str, Any]
) -> None:
    """And as often as the node lies."""
    fleet = SeenFleet(2, 0, num_prefill=2)
    liar = (fleet.prefills if role is Role.PREFILL else fleet.decodes)[0]
    for num_failures in range(1, FAILURES_TO_OPEN + 1):
        req = fleet.start_on(liar, max_new_tokens=NUM_NEW, **params)
        key, others = req.key, [node for node in req.nodes if node is not liar]
        for fields in lie:
            assert req.key == key, "what came before is right"
            fleet.dispatcher.on_tokens(liar, [TokenEntry(key, **fields)])
        assert req.key.attempt == 1 and liar not in req.nodes and not req.ended
        assert Cancel(key) in liar.sent
        if len(lie) == 1:  # else the decode node has spoken, and the prefill node holds nothing
            assert all(Cancel(key) in other.sent for other in others)
        assert all(5 <= token_id <= 7 for token_id in req.output_ids)
        assert fleet.dispatcher._suspicion.shuns(liar) is (num_failures == FAILURES_TO_OPEN)
    assert not any(liar in fleet.start().nodes for _ in range(20))


@pytest.mark.parametrize("ids", [(0,), (VOCAB_SIZE - 1,), (0, 5, VOCAB_SIZE - 1)])
def test_what_can_be_is_taken(ids: tuple[int, ...]) -> None:
    fleet = SeenFleet(1)
    req = fleet.start(max_new_tokens=NUM_NEW)
    fleet.tell(req, *ids, report=ReqReport(cached_tokens=len(IDS)))
    fleet.tell(req, 5, finish=Finish("stop", 5))
    assert (req.output_ids, req.cached_tokens, req.error) == ([*ids, 5], len(IDS), None)


def test_output_of_an_earlier_attempt_may_be_cached_too() -> None:
    fleet = SeenFleet(2, 0)
    req = fleet.start(max_new_tokens=NUM_NEW)
    fleet.tell(req, 5, 6)
    fleet.kill(req.nodes[-1], Loss.BROKEN)
    fleet.tell(req, 7, report=ReqReport(cached_tokens=len(IDS) + 2))
    assert (req.output_ids, req.key.attempt) == ([5, 6, 7], 1)


def test_a_finish_without_a_token_ends_what_asked_for_none() -> None:
    fleet = SeenFleet(1)
    req = fleet.start(max_new_tokens=0)
    fleet.tell(req, finish=LENGTH)
    assert req.finish == LENGTH and req.output_ids == []


def test_a_prefill_node_that_lies_late_does_not_disturb_the_stream() -> None:
    """The decode node has spoken, so that the sequence does not need the prefill node."""
    fleet = SeenFleet(1, 0)
    req = fleet.start(max_new_tokens=NUM_NEW)
    fleet.tell(req, 5)
    fleet.tell(req, -1, by=req.nodes[0], at=0)
    fleet.tell(req, *[6] * (NUM_NEW - 1), finish=LENGTH)
    assert req.finish == LENGTH and req.key.attempt == 0


@pytest.mark.parametrize("lie", ["a token id", "not cached"])
def test_it_ends_with_the_reason_when_every_node_lies(lie: str) -> None:
    """That a prompt is not cached is answered only where a bound was asked for, which is not asked for again."""
    fleet, num_sent = SeenFleet(2, 0), 0
    req = fleet.start(max_new_tokens=NUM_NEW)
    while not req.ended:
        if req.nodes:
            num_sent += 1
            if lie == "not cached":
                fleet.dispatcher.on_not_cached(req.nodes[-1], req.key)
            else:
                fleet.tell(req, 1 << 40)
        fleet.wait(5)
    assert req.error is not None and (req.error.status, req.error.code) == (503, "wrong_answer")
    assert num_sent < 10


def told_as(*entry: object) -> bytes:
    """A message of tokens whose entry may be anything."""
    return msgspec.msgpack.encode(["Tokens", [[["router", "1", 0], *entry]]])


NO_MESSAGES: dict[str, bytes] = {
    "an id that is a string": told_as(0, ["5"]),
    "an id that is a float": told_as(0, [5.5]),
    "a position that is nothing": told_as(None, [5]),
    "logprobs whose parts do not fit": told_as(0, [5], None, None, [b"\0" * 4, b"\0" * 3, b"", b""]),
    "a stamp of the year 5000": told_as(0, [5], None, [1, [["decode", "queued", 1e11]]]),
    "no message": b"\xc1",
    "an empty message": b"",
    "a message of the other direction": msgspec.msgpack.encode(Flush(1)),
    "not UTF-8": b"\x92\xa7Leaving\xa2\xff\xfe",
    "nested without end": b"\x92\xa6Tokens" + b"\x91" * 50_000 + b"\x00",
}


@pytest.mark.parametrize("payload", NO_MESSAGES.values(), ids=NO_MESSAGES)
async def test_what_is_no_message_breaks_the_connection(payload: bytes) -> None:
    async with FakeNode(Role.DECODE) as node, new_membership() as (membership, events):
        await dialled(membership, node)
        node._socket.send_multipart([node._router, payload], zmq.DONTWAIT)
        await eventually(lambda: bool(events.lost))
        assert events.losses == [Loss.BROKEN]


async def test_the_client_sees_none_of_it(model_folder: Path) -> None:
    async def beyond_the_vocabulary(node: FakeNode, message: Prefill | Decode) -> None:
        node.tokens(message.key, 0, [byte_level_tokenizer().get_vocab_size()])

    dispatch = DispatchOptions(local_prefill_tokens=0, decode_policy="round-robin")
    async with (
        FakeNode(Role.DECODE, "liar", script=beyond_the_vocabulary) as liar,
        FakeNode(Role.DECODE, "honest", script=tell_story) as honest,
        joined_router(model_folder, [liar, honest], dispatch=dispatch) as (_, client),
    ):
        while not liar.all(Decode):
            body = {"text": "a", "sampling_params": {"max_new_tokens": NUM_NEW}}
            response = await client.post("/generate", json=body)
            assert response.status_code == 200 and len(response.json()["output_ids"]) == NUM_NEW


@pytest.mark.parametrize(
    ("part", "field", "size"),
    [
        (LAYOUT, "page_size", 0),
        (LAYOUT, "page_size", -16),
        (LAYOUT, "num_layers", 0),
        (LAYOUT, "head_dim", -8),
        (LIMITS, "context_length", 0),
        (LIMITS, "max_total_num_tokens", -1),
        (LIMITS, "max_running_requests", 0),
    ],
)
def test_a_node_of_sizes_that_cannot_be_is_refused(part: Struct, field: str, size: int) -> None:
    broken = msgspec.structs.replace(part, **{field: size})
    layout, limits = (broken, LIMITS) if part is LAYOUT else (LAYOUT, broken)
    hello = NodeHello(NodeRef("d", "d#1", ""), Role.DECODE, layout, limits, {}, PROTOCOL_VERSION)  # type: ignore[arg-type]
    with pytest.raises(Refusal, match=field):
        raise_if_impossible(hello)
