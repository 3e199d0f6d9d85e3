"""Long texts do not hold up the event loop, each other, or anybody when their client has gone."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from router.request.admission import Admissions
from router.request.generation import Generator
from router.request.prompt import AnswerOptions, Prompt
from router.text.tokenizer import INLINE_CHARS, MEDIUM_CHARS, TextWorkers, Tokenizer
from shared.protocol.messages import NodeLimits, Prefill, Work
from shared.protocol.sampling_params import SamplingParams
from tests.patience import PATIENCE_S
from tests.unit.router.dispatched import SeenFleet
from tests.unit.router.fakes import joined_pair, until_queued, write_model
from tests.unit.router.sample_tokenizers import KINDS, TEXTS, sample

LONG = MEDIUM_CHARS + 1
LONG_TEXT = "".join(TEXTS) * (INLINE_CHARS // len("".join(TEXTS)) + 1)


class Gate:
    """Work that says when it has begun, and ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> str:
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return "done"

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 20)


async def test_short_work_is_done_at_once() -> None:
    workers = TextWorkers()
    assert await workers.run(INLINE_CHARS, threading.current_thread) is threading.current_thread()
    assert await workers.run(INLINE_CHARS + 1, threading.current_thread) is not threading.current_thread()
    workers.close()


async def test_long_work_waits_in_line_and_who_leaves_it_is_not_served() -> None:
    workers, gates, ran = TextWorkers(num_long=2), [Gate(), Gate()], list[str]()
    running = [asyncio.create_task(workers.run(LONG, gate)) for gate in gates]
    for gate in gates:
        await gate.has_begun()
    leaves = asyncio.create_task(workers.run(LONG, lambda: ran.append("left")))
    stays = asyncio.create_task(workers.run(LONG, lambda: ran.append("stayed")))
    assert await workers.run(MEDIUM_CHARS, lambda: "medium") == "medium", "it does not wait for long ones"
    assert ran == []
    leaves.cancel()
    await asyncio.wait([leaves])  # it has left the line
    gates[0].may_end.set()
    await stays
    gates[1].may_end.set()
    assert await asyncio.gather(*running) == ["done", "done"]
    assert ran == ["stayed"]
    workers.close()


async def test_others_get_on_between_the_items_of_a_batch() -> None:
    workers, gate, order = TextWorkers(num_long=1), Gate(), list[str]()

    def work(name: str) -> str:
        if name == "a":
            gate()
        order.append(name)
        return name.upper()

    sizes = {"a": LONG, "b": LONG, "c": MEDIUM_CHARS - 1, "d": 1, "e": 1}
    batch = asyncio.create_task(workers.run_each(list(sizes), sizes.__getitem__, work))
    await gate.has_begun()
    other = asyncio.create_task(workers.run(LONG, lambda: order.append("other")))
    assert await workers.run(MEDIUM_CHARS, lambda: "medium") == "medium"
    gate.may_end.set()
    await other
    assert await batch == ["A", "B", "C", "D", "E"]
    assert order == ["a", "other", "b", "c", "d", "e"]
    assert await workers.run_each([], len, work) == []
    workers.close()


class Recording:
    """A tokenizer that tells which of its methods were called."""

    def __init__(self, kind: str) -> None:
        self.calls: list[str] = []
        self._tokenizer = sample(kind)

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("kind", KINDS)
async def test_long_texts_go_through_calls_that_let_the_gil_go(kind: str) -> None:
    """`encode` and `decode` of the library hold it for as long as they take, seconds for a long prompt."""
    recording: Any = Recording(kind)
    tokenizer = Tokenizer(recording)
    recording.calls.clear()
    for special in (True, False):
        ids = await tokenizer.encode([LONG_TEXT, "short"], add_special_tokens=special)
        expected = [sample(kind).encode(t, add_special_tokens=special).ids for t in (LONG_TEXT, "short")]
        assert ids == expected
    assert recording.calls == ["encode_batch_fast"] * 4
    recording.calls.clear()
    texts = await tokenizer.decode([ids[0] * 4, ids[1]], skip_special_tokens=False)
    assert texts == [sample(kind).decode(row, skip_special_tokens=False) for row in (ids[0] * 4, ids[1])]
    assert recording.calls == ["decode_batch"] * 2
    tokenizer.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "fox " * LONG}),
        ("/v1/completions", {"prompt": "fox " * LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox " * LONG}]}),
    ],
)
async def test_a_request_whose_prompt_waits_can_be_called_off(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, context_length=1 << 20)

    async with joined_pair(folder) as (nodes, router, client):
        workers = router.model.get().tokenizer.workers
        gates = [Gate() for _ in range(workers.num_long)]
        blocked = [asyncio.create_task(workers.run(LONG, gate)) for gate in gates]
        for gate in gates:
            await gate.has_begun()
        asked = asyncio.create_task(client.post(path, json=body))  # its client leaves
        await until_queued(client, 1)
        asked.cancel()
        await until_queued(client, 0)
        asked = asyncio.create_task(client.post(path, json={**body, "rid": "job"}))
        await until_queued(client, 1)
        aborted = await client.post("/abort_request", json={"rid": "job"})
        assert aborted.json()["aborted"] == 1
        for gate in gates:
            gate.may_end.set()
        await asyncio.gather(*blocked)
        assert '"abort"' in (await asked).text
        assert await workers.run(LONG, lambda: "next in line") == "next in line"
        assert nodes[0].all(Prefill) == []


@pytest.mark.parametrize(("prompt_len", "n", "most_a_turn"), [(100_000, 3, 1), (10, 64, 16)])
async def test_much_work_is_dispatched_in_several_turns(prompt_len: int, n: int, most_a_turn: int) -> None:
    fleet = SeenFleet(1)
    for node in fleet.nodes:
        node.limits = NodeLimits(1 << 20, 1 << 20, 64)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            fleet.now += 1

    counting = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    work = Work((1,) * prompt_len, SamplingParams())
    prompt = Prompt(rid="a", work=work, options=AnswerOptions(n=n))
    admissions = Admissions(fleet.dispatcher.queue, n, lambda: None)
    generator, admission = Generator(fleet.dispatcher, admissions), admissions.beside_the_queue()
    admission.take(["a"], [n], whole=None, shared=False)
    async with generator.open([prompt], Tokenizer(sample("gpt2")), admission) as group:
        turns = Counter(generation.req.started_at for generation in group.generations)
    assert turns.total() == n and max(turns.values()) <= most_a_turn
    counting.cancel()
