"""Fair shares between API keys: whose turn it is, and which places in the queue a key may have."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from pathlib import Path

import pytest

from router.dispatch.running_req import RunningReq
from router.dispatch.waiting_queue import MIN_AHEAD_TOKENS, OUTPUT_WEIGHT, SEQUENCE_TOKENS, WaitingQueue
from router.http.api_keys import ApiKeys, KeySource
from router.http.config import DispatchOptions, HttpOptions
from router.request.queue_limit import QueueLimit
from shared.errors import RequestError
from shared.protocol.messages import Decode, Finish, Load, Prefill, ReqKey, Role, TokenEntry, Work
from shared.protocol.sampling_params import SamplingParams
from tests.patience import eventually
from tests.unit.router.dispatched import IDS, Fleet
from tests.unit.router.fakes import figure, joined_router, pair, say_nothing, until_figure, until_queued

COST = len(IDS) + SEQUENCE_TOKENS
AHEAD = -(-MIN_AHEAD_TOKENS // COST)
"""So many sequences are sent ahead to one node."""


class Keys:
    """A fleet whose clients have several keys; nothing of a prompt is cached."""

    def __init__(self) -> None:
        self.fleet = Fleet(1, 0)
        self.reqs: list[RunningReq] = []

    def start(self, api_key: int | None, count: int = 1) -> list[RunningReq]:
        work = Work(IDS, SamplingParams(max_new_tokens=1000))
        new = [self.fleet.dispatcher.start(work, lambda: None, api_key=api_key) for _ in range(count)]
        self.reqs += new
        return new

    @property
    def sent(self) -> list[int | None]:
        """The keys of the sequences that were sent, in that order."""
        of = {req.key.rid: req.api_key for req in self.reqs}
        return [of[m.key.rid] for m in self.fleet.prefills[0].sent if isinstance(m, Prefill)]

    def answer(self, req: RunningReq, num_tokens: int = 1) -> None:
        """The prefill node tells the first token; the decode node repeats it before it goes on."""
        node = self.fleet.decodes[0] if req.last_token_at else self.fleet.prefills[0]
        entry = TokenEntry(req.key, 0, tuple(range(len(req.output_ids) + num_tokens)))
        self.fleet.dispatcher.on_tokens(node, [entry])

    def answer_all(self) -> None:
        """Each sequence that was sent gets its first token, until every one has it."""
        for _ in self.reqs:
            waiting = [req for req in self.reqs if req.nodes and req.last_token_at is None]
            if waiting:
                self.fleet.now += 1
                self.answer(min(waiting, key=lambda req: req.attempt.sent_at))


def test_without_keys_all_are_sent_at_once() -> None:
    keys = Keys()
    keys.start(None, 100)
    assert len(keys.sent) == 100


def test_nodes_get_what_keeps_them_busy() -> None:
    keys = Keys()
    keys.start(1, 100)
    assert len(keys.sent) == AHEAD
    keys.fleet.prefills[0].load = Load(prefill_tokens_per_s=4 * MIN_AHEAD_TOKENS)
    keys.start(1)
    assert len(keys.sent) == -(-2 * MIN_AHEAD_TOKENS // COST)
    assert keys.fleet.dispatcher.queue.num_without_turn == 101 - len(keys.sent)


def test_a_greedy_key_does_not_delay_another() -> None:
    keys = Keys()
    keys.start(1, 100)
    five = keys.start(2, 5)
    keys.answer_all()
    assert keys.sent[AHEAD : AHEAD + 10] == [2, 1] * 5
    assert len(keys.sent) == 105
    assert all(req.turn_s <= 10 for req in five)


def test_output_counts() -> None:
    keys = Keys()
    first = keys.start(1, 100)[0]
    keys.start(2, 100)
    keys.answer(first)
    keys.answer(first, 2 * COST // OUTPUT_WEIGHT)
    for _ in range(4):
        keys.answer(next(req for req in keys.reqs if req.nodes and req.last_token_at is None))
    assert keys.sent[AHEAD:] == [2, 2, 2, 1, 2], "key 1 had two prompts more in output tokens"


def test_a_key_that_comes_back_has_saved_nothing_up() -> None:
    keys = Keys()
    keys.start(1, 100)
    keys.start(2, 20)
    for _ in range(30):
        keys.answer(next(req for req in keys.reqs if req.nodes and req.last_token_at is None))
    keys.start(3, 20)
    num_sent = len(keys.sent)
    for _ in range(12):
        keys.answer(next(req for req in keys.reqs if req.nodes and req.last_token_at is None))
    assert Counter(keys.sent[num_sent:]) == {1: 4, 2: 4, 3: 4}


def test_a_sequence_that_ends_while_it_waits_is_never_sent() -> None:
    keys = Keys()
    greedy = keys.start(1, AHEAD + 5)
    gone = [weakref.ref(req) for req in greedy[AHEAD : AHEAD + 4]]
    for req in greedy[AHEAD : AHEAD + 4]:
        keys.fleet.dispatcher.release(req)
    assert keys.fleet.dispatcher.queue.num_without_turn == 1
    del keys.reqs[AHEAD : AHEAD + 4], greedy[AHEAD : AHEAD + 4], req
    assert not any(req() for req in gone), "it is not kept until its turn would have come"
    for req in greedy[:AHEAD]:
        keys.fleet.dispatcher.abort(req, "stop")
    assert len(keys.sent) == AHEAD + 1
    assert greedy[-1].nodes
    keys.fleet.dispatcher.close("stop")
    assert keys.fleet.dispatcher.num_running == len(keys.fleet.dispatcher.queue) == 0


def test_a_sequence_that_has_ended_is_before_no_other() -> None:
    """It would have new requests of its key refused (--ttft-limit-s)."""
    queue, work = WaitingQueue(lambda: 0.0), Work(IDS, SamplingParams())
    for i in range(4):
        queue.join(str(i), 1)
        queue.join_turns(
            RunningReq(ReqKey("r", str(i)), work, wake=lambda: None, now=0.0, api_key=1), len(IDS)
        )
    assert queue.num_tokens_ahead(1) == 4 * COST
    queue.leave("1", served=False)
    queue.leave("1", served=False)
    assert queue.num_tokens_ahead(1) == 3 * COST
    assert [req.key.rid for req in queue.take(1 << 20)] == ["0", "2", "3"]
    assert (queue.num_tokens_ahead(1), queue.num_without_turn) == (0, 0)


def test_a_turn_without_nodes_waits_for_some() -> None:
    keys = Keys()
    greedy = keys.start(1, AHEAD + 1)
    decodes, keys.fleet.decodes = keys.fleet.decodes, []
    keys.answer(greedy[0])
    assert not greedy[-1].nodes
    keys.fleet.decodes = decodes
    keys.fleet.wait(1)
    assert [node.role for node in greedy[-1].nodes] == [Role.PREFILL, Role.DECODE]


def test_one_key_cannot_fill_the_queue() -> None:
    queue = WaitingQueue(lambda: 0.0)
    limit = QueueLimit(queue, 10, lambda: None)
    for i in range(8):
        with limit.places(1) as places:
            places.hold(1)
            queue.join(str(i), 1)
            places.dispatched()
    with pytest.raises(RequestError, match="has 8 of 10 places in the queue, and 2 are free") as caught:
        limit.places(1)
    assert caught.value.status == 429
    with limit.places(2), limit.places(None):
        pass
    queue.leave("0", served=True)
    with limit.places(1):
        pass


def test_keys_have_numbers_where_there_are_several() -> None:
    def keys(*given: str) -> ApiKeys:
        source = KeySource(flag="--api-key", given=given)
        return ApiKeys(clients=source, admins=KeySource(flag="--admin-api-key", given=("admin",)))

    assert keys("a").number(b"Bearer a") is None
    several = keys("a", "b")
    assert [several.number(b"Bearer " + key) for key in (b"a", b"b", b"admin", b"")] == [1, 2, 3, 0]


async def test_the_key_of_a_request_decides(model_folder: Path) -> None:
    dispatch = DispatchOptions(local_prefill_tokens=0)
    http = HttpOptions(port=0, served_model_name="tiny", api_keys=("a", "b"))
    async with (
        pair(prefill=say_nothing, decode=say_nothing) as nodes,
        joined_router(model_folder, list(nodes), dispatch=dispatch, http=http, wait=False) as (
            router,
            client,
        ),
    ):
        await router.ready([node.node_id for node in nodes])
        client.headers["Authorization"] = "Bearer a"
        greedy = asyncio.create_task(
            client.post("/generate", json={"text": "a", "sampling_params": {"n": 60}})
        )
        await until_queued(client, 60)

        async def held() -> int:
            """The rest of those that were sent: all have their place before the first is sent."""
            num_held = int(await figure(client, "baton:num_held_reqs"))
            return num_held if num_held + len(nodes[1].all(Decode)) == 60 else 0

        num_held = await eventually(held)
        assert num_held < 60
        client.headers["Authorization"] = "Bearer b"
        other = asyncio.create_task(client.post("/generate", json={"text": "a", "rid": "other"}))
        await until_queued(client, 61)
        await until_figure(client, "baton:num_held_reqs", num_held + 1)
        first = await nodes[1].wait_for(Decode, 60 - num_held)
        nodes[1].tokens(first.key, 0, [1], Finish("length"))
        newest = await nodes[1].wait_for(Decode, 61 - num_held)
        nodes[1].tokens(newest.key, 0, [1], Finish("length"))
        assert (await other).status_code == 200, "it was sent before the rest of the other key"
        await client.post("/abort_request", json={"abort_all": True})
        assert (await greedy).status_code == 200
        await until_queued(client, 0)
