"""Logprobs, penalties and biases over HTTP: what is sent to scripted nodes, and how their answers are worded."""

from __future__ import annotations

import asyncio
import itertools
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.api.generate_api import GenerateBody
from router.api.logprobs import NativeLogprobs, ScoredText
from router.api.openai_bodies import CompletionBody
from router.dispatch.running_req import RunningReq
from router.request.admission import Admissions
from router.request.generation import Generation, Generator
from router.request.output_text import OutputText
from router.request.prompt import MAX_ANSWER_LOGPROBS, AnswerOptions, Prompt
from router.text.served_model import ServedModel
from router.text.tokenizer import INLINE_CHARS, Tokenizer
from shared.errors import RequestError
from shared.protocol.logprobs import MAX_INPUT_LOGPROBS, LogprobParams, Logprobs
from shared.protocol.messages import Decode, NodeLimits, Prefill, ReqKey, TokenEntry, Work
from shared.protocol.sampling_params import SamplingParams
from tests.patience import PATIENCE_S
from tests.unit.router.bodies import prompts_of
from tests.unit.router.dispatched import SeenFleet
from tests.unit.router.fake_node import FakeNode, byte_level_tokenizer
from tests.unit.router.fakes import events, joined_pair
from tests.unit.router.sample_tokenizers import KINDS, sample
from tests.unit.router.scoring import packed, scored_first_token, scored_story, value

PROMPT_IDS = [10, 11, 12, 13, 14]
NUM_NEW = 4


async def silent_first_token(node: FakeNode, message: Prefill | Decode) -> None:
    """A prefill node whose messages are lost: position 0 comes from the decode node alone."""


def run(folder: Path, path: str, body: dict[str, Any], **scripts: object) -> tuple[Any, FakeNode]:
    """The answer (parsed, or a list of events), and the prefill node."""

    async def go() -> tuple[Any, FakeNode]:
        both = {"prefill": scored_first_token, "decode": scored_story, **scripts}
        async with joined_pair(folder, **both) as ((prefill, _decode), _, client):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            if body.get("stream"):
                *seen, done = events(response.text)
                assert done == "[DONE]"
                return seen, prefill
            return response.json(), prefill

    return asyncio.run(go())


@pytest.fixture(scope="module")
def story() -> list[int]:
    return FakeNode("prefill").story[:NUM_NEW]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer(model: ServedModel) -> Tokenizer:
    return model.tokenizer


def native(**fields: object) -> dict[str, Any]:
    return {
        "input_ids": PROMPT_IDS,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": NUM_NEW},
        **fields,
    }


def test_outputs_only_is_the_default(model_folder: Path, story: list[int]) -> None:
    answer, prefill = run(model_folder, "/generate", native())
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[value(i), token, None] for i, token in enumerate(story)]
    assert not [name for name in meta if "top" in name or "ids_logprobs" in name]
    assert prefill.all(Prefill)[0].work.params.logprobs == LogprobParams()


@pytest.mark.parametrize("prefill", [scored_first_token, silent_first_token], ids=["p_first", "d_alone"])
def test_everything_at_once(
    model_folder: Path, story: list[int], tokenizer: Tokenizer, prefill: object
) -> None:
    body = native(
        logprob_start_len=2, top_logprobs_num=2, token_ids_logprob=[7, 8, 9], return_text_in_logprobs=True
    )
    answer, _ = run(model_folder, "/generate", body, prefill=prefill)
    meta = answer["meta_info"]
    text = tokenizer.token_text
    assert meta["input_token_logprobs"] == [
        [None, 12, text(12)],
        [value(3 - 1000), 13, text(13)],
        [value(4 - 1000), 14, text(14)],
    ]
    assert meta["output_token_logprobs"] == [[value(i), t, text(t)] for i, t in enumerate(story)]
    top = lambda p: [[value(p), 100, text(100)], [value(p, 1), 101, text(101)]]  # noqa: E731
    assert meta["input_top_logprobs"] == [None, top(3 - 1000), top(4 - 1000)]
    assert meta["output_top_logprobs"] == [top(i) for i in range(NUM_NEW)]
    of_ids = lambda p: [[value(p, 20 + n), i, text(i)] for n, i in enumerate([7, 8, 9])]  # noqa: E731
    assert meta["input_token_ids_logprobs"] == [None, of_ids(3 - 1000), of_ids(4 - 1000)]
    assert meta["output_token_ids_logprobs"] == [of_ids(i) for i in range(NUM_NEW)]


@pytest.mark.parametrize(("start", "num_new"), [(4, NUM_NEW), (0, 0)], ids=["last token", "score only"])
def test_the_first_token_has_nothing_to_be_scored_by(model_folder: Path, start: int, num_new: int) -> None:
    body = native(logprob_start_len=start, top_logprobs_num=1, sampling_params={"max_new_tokens": num_new})
    meta = run(model_folder, "/generate", body)[0]["meta_info"]
    scored = [[value(i - 1000), 10 + i, None] for i in range(start + 1, 5)]
    assert meta["input_token_logprobs"] == [[None, 10 + start, None], *scored]
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"]) == 5 - start
    assert len(meta["output_token_logprobs"]) == num_new


def test_a_stream_is_cumulative(model_folder: Path, story: list[int]) -> None:
    seen, _ = run(model_folder, "/generate", native(logprob_start_len=3, stream=True))
    for event in seen:
        meta = event["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 13, None], [value(4 - 1000), 14, None]]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == event["output_ids"]
    assert seen[-1]["output_ids"] == story


def test_a_stop_string_ends_the_logprobs_with_the_tokens(model_folder: Path, story: list[int]) -> None:
    text = byte_level_tokenizer().decode(story)
    stop = text[len(byte_level_tokenizer().decode(story[:2])) :][:1]
    body = native(sampling_params={"max_new_tokens": NUM_NEW, "stop": stop})
    answer, _ = run(model_folder, "/generate", body)
    assert answer["output_ids"] == story[: len(answer["output_ids"])]
    assert 0 < len(answer["output_ids"]) < NUM_NEW
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": NUM_NEW, "logprobs": True}
COMPLETION = {"prompt": "The quick", "max_tokens": NUM_NEW, "logprobs": 2}


WIDE = {"top_logprobs_num": 20, "token_ids_logprob": [7] * 983}  # 1024 numbers a token
MOST = MAX_INPUT_LOGPROBS // 1024


ROW = [1] * (MOST + 1)
TOO_MANY: list[dict[str, Any]] = [
    native(input_ids=[*ROW, 1], logprob_start_len=0, **WIDE),
    native(input_ids=[[1], [*ROW, 1, 1]], logprob_start_len=[0, 1], **WIDE),
    native(input_ids=[ROW] * 5, logprob_start_len=0, **WIDE),
    native(input_ids=ROW, logprob_start_len=0, sampling_params={"n": 5}, **WIDE),
    {"prompt": [1] * (MAX_INPUT_LOGPROBS // 41 + 2), "echo": True, "logprobs": 20},
]


@pytest.mark.parametrize("body", TOO_MANY, ids=range(len(TOO_MANY)))
async def test_more_numbers_than_can_be_told_are_refused_here(
    model: ServedModel, body: dict[str, Any]
) -> None:
    kind, param = (CompletionBody, "logprobs") if "prompt" in body else (GenerateBody, "logprob_start_len")
    with pytest.raises(RequestError) as refused:
        await prompts_of(model, kind, body)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (
            {
                "return_logprob": [True, False, True],
                "logprob_start_len": [0, 0, -1],
                "top_logprobs_num": [1, 0, 2],
                "token_ids_logprob": [[5], None, [6, 7]],
            },
            [LogprobParams(0, 1, (5,)), None, LogprobParams(-1, 2, (6, 7))],
        ),
        ({"token_ids_logprob": [5, 6]}, [LogprobParams(-1, 0, (5, 6))] * 3),
        ({"return_logprob": False, "top_logprobs_num": 3, "logprob_start_len": 0}, [None] * 3),
    ],
    ids=["for each prompt", "one list of ids", "not asked for"],
)
async def test_what_a_batch_asks_for(
    model: ServedModel, fields: dict[str, Any], wanted: list[LogprobParams | None]
) -> None:
    prompts = await prompts_of(model, GenerateBody, native(input_ids=[[1, 2, 3], [4, 5], [7]], **fields))
    assert [prompt.work.params.logprobs for prompt in prompts] == wanted


async def test_the_most_numbers_fit_into_a_message_and_an_answer(model_folder: Path) -> None:
    """They come from both nodes, four times 2 MiB from each, and are told in one event for each choice."""
    body = native(input_ids=ROW, logprob_start_len=0, sampling_params={"max_new_tokens": 1, "n": 4}, **WIDE)
    scripts: Any = {"prefill": scored_first_token, "decode": scored_story}
    async with joined_pair(model_folder, limits=NodeLimits(300_000, 300_000, 8), **scripts) as (_, _, client):
        response = await client.post("/generate", json=body, timeout=PATIENCE_S)
        assert response.status_code == 200, response.text
        for answer in response.json():
            meta = answer["meta_info"]
            assert len(meta["input_token_logprobs"]) == MOST + 1
            assert {len(row) for row in meta["input_token_ids_logprobs"][1:]} == {983}
            assert meta["input_token_logprobs"][-1][0] == value(MOST - 1000)


def test_a_stream_words_the_prompt_once() -> None:
    params = SamplingParams(logprobs=LogprobParams(0, 2, (7,)), max_new_tokens=NUM_NEW)
    prompt = Prompt(rid="a", work=Work(tuple(PROMPT_IDS), params))
    key = ReqKey("router", "1")
    req = RunningReq(key, prompt.work, wake=lambda: None, now=0.0)
    tokenizer = Tokenizer(byte_level_tokenizer())
    output = OutputText(tokenizer, prompt, None)
    generation = Generation(prompt, 0, 0, 0, output)
    generation.dispatched(req)
    words: list[int] = []

    def text_of(token_id: int) -> str:
        words.append(token_id)
        return str(token_id)

    async def go() -> list[dict[str, object]]:
        logprobs = NativeLogprobs(generation, tokenizer.workers, text_of)
        seen = []
        for position in range(NUM_NEW):
            assert params.logprobs is not None
            req.arrive_logprobs(
                TokenEntry(
                    key,
                    position,
                    (20 + position,),
                    logprobs=packed([position], params.logprobs),
                    input_logprobs=None if position else packed([1, 2, 3, 4], params.logprobs),
                )
            )
            req.arrive(position, (20 + position,), None, 0.0)
            generation.advance()
            seen.append(msgspec.json.decode(msgspec.json.encode(await logprobs.so_far())))
        return seen

    seen = asyncio.run(go())
    of_prompt = [event["input_token_logprobs"] for event in seen]
    assert all(rows == of_prompt[0] for rows in of_prompt)
    assert [row[1] for row in of_prompt[0]] == PROMPT_IDS
    assert [len(event["output_top_logprobs"]) for event in seen] == [1, 2, 3, 4]
    assert seen[-1]["output_token_logprobs"] == [[value(i), 20 + i, str(20 + i)] for i in range(NUM_NEW)]
    assert [words.count(token_id) for token_id in PROMPT_IDS] == [1] * len(PROMPT_IDS)
    assert [words.count(20 + i) for i in range(NUM_NEW)] == [1] * NUM_NEW


class TestChat:
    def test_one_answer(self, model_folder: Path, story: list[int], tokenizer: Tokenizer) -> None:
        answer, prefill = run(model_folder, "/v1/chat/completions", {**CHAT, "top_logprobs": 2})
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["refusal"] is None
        for i, (entry, token) in enumerate(zip(logprobs["content"], story, strict=True)):
            assert entry["token"] == tokenizer.token_text(token)
            assert bytes(entry["bytes"]) == tokenizer.vocabulary.token_bytes(token)
            assert entry["logprob"] == value(i)
            assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
                (tokenizer.token_text(100 + rank), value(i, rank)) for rank in range(2)
            ]
        joined = b"".join(bytes(entry["bytes"]) for entry in logprobs["content"]).decode()
        assert joined == answer["choices"][0]["message"]["content"]
        assert prefill.all(Prefill)[0].work.params.logprobs == LogprobParams(top_num=2)

    def test_a_stream_tells_each_token_once(self, model_folder: Path, story: list[int]) -> None:
        seen, _ = run(model_folder, "/v1/chat/completions", {**CHAT, "stream": True})
        told = [e["choices"][0]["logprobs"]["content"] for e in seen if e["choices"][0]["logprobs"]]
        assert [entry["logprob"] for entry in itertools.chain(*told)] == [value(i) for i in range(NUM_NEW)]


class TestCompletions:
    def test_one_answer(self, model_folder: Path, story: list[int], tokenizer: Tokenizer) -> None:
        answer, prefill = run(model_folder, "/v1/completions", COMPLETION)
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [tokenizer.token_text(token) for token in story]
        assert logprobs["token_logprobs"] == [value(i) for i in range(NUM_NEW)]
        for i, top in enumerate(logprobs["top_logprobs"]):
            assert top == {
                tokenizer.token_name(100): value(i),
                tokenizer.token_name(101): value(i, 1),
                tokenizer.token_text(story[i]): value(i),
            }
        for offset, text in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"][offset:].startswith(text)
        assert prefill.all(Prefill)[0].work.params.logprobs == LogprobParams(top_num=2)

    @pytest.mark.parametrize("echo", [False, True])
    def test_every_token_has_an_entry(self, model_folder: Path, tokenizer: Tokenizer, echo: bool) -> None:
        """Tokens 100 to 104 are parts of characters, which have no text of their own."""
        body = {**COMPLETION, "prompt": "ᚠᛇ", "logprobs": 5, "echo": echo}
        logprobs = run(model_folder, "/v1/completions", body)[0]["choices"][0]["logprobs"]
        positions = [i - 1000 for i in range(1, 6)] if echo else []
        tops = logprobs["top_logprobs"][1:] if echo else logprobs["top_logprobs"]
        for name, position, top in zip(
            logprobs["tokens"][echo:], [*positions, *range(NUM_NEW)], tops, strict=True
        ):
            assert len(top) == 6 and top[name] == value(position)
            assert [top[tokenizer.token_name(100 + rank)] for rank in range(5)] == [
                value(position, rank) for rank in range(5)
            ]
        if echo:
            told = b"".join(
                bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
                for name in logprobs["tokens"][:6]
            )
            assert told == "ᚠᛇ".encode()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("own", [0, 150])
    def test_tokens_of_one_text_are_told_apart(self, kind: str, own: int) -> None:
        """Whatever the vocabulary, and ids beyond it too; the token itself has the name that `tokens` has."""
        tokenizer = Tokenizer(sample(kind))
        params = SamplingParams(logprobs=LogprobParams(top_num=250))
        prompt = Prompt(rid="a", work=Work((1,), params))
        req = RunningReq(ReqKey("router", "1"), prompt.work, wake=lambda: None, now=0.0)
        generation = Generation(prompt, 0, 0, 0, OutputText(tokenizer, prompt, None))
        generation.dispatched(req)
        ids = [*range(200), *range(100_000, 100_050)]
        scores = {token_id: -1 - at / 64 for at, token_id in enumerate(ids)}
        known = Logprobs(
            struct.pack("<f", scores[own]),
            struct.pack("<250i", *ids),
            struct.pack("<250f", *scores.values()),
            b"",
        )
        req.arrive_logprobs(TokenEntry(req.key, 0, (own,), logprobs=known))
        req.arrive(0, (own,), None, 0.0)
        generation.advance()
        told = ScoredText(generation, tokenizer, None).logprobs(prompt=False, output_from=0)
        (top,), (name,) = told.top_logprobs, told.tokens
        assert top is not None
        assert list(top.values()) == [*scores.values()]
        assert top[name] == scores[own] and name == tokenizer.token_name(own)

    @pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "gemma", "nested_bytes"])
    def test_parts_of_a_character_are_named_by_their_bytes(self, kind: str) -> None:
        tokenizer = Tokenizer(sample(kind))
        (ids,) = asyncio.run(tokenizer.encode(["ᚠ"], add_special_tokens=False))
        names = [tokenizer.token_name(i) for i in ids if tokenizer.token_text(i) != " "]
        assert len(names) > 1 and all(name.startswith("bytes:\\x") for name in names)
        told = "".join(name.removeprefix("bytes:") for name in names).replace("\\x", "")
        assert bytes.fromhex(told) == "ᚠ".encode()
        letter = sample(kind).token_to_id("T")
        assert letter is not None and tokenizer.token_name(letter) == "T"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_long_echo_is_written_beside_the_loop(self, model_folder: Path, stream: bool) -> None:
        body = {**COMPLETION, "echo": True, "logprobs": 5, "prompt": [7] * 150, "stream": stream}

        scripts: Any = {"prefill": scored_first_token, "decode": scored_story}
        async with joined_pair(model_folder, **scripts) as (pairs, router, client):
            workers = router.model.get().tokenizer.workers
            may_go_on = threading.Event()
            waiting = asyncio.create_task(workers.run(INLINE_CHARS + 1, lambda: may_go_on.wait(PATIENCE_S)))
            echoed = asyncio.create_task(client.post("/v1/completions", json=body))
            await pairs[1].wait_for(Decode)
            short = {**COMPLETION, "prompt": [7], "logprobs": None}
            assert (await client.post("/v1/completions", json=short)).status_code == 200
            assert not echoed.done()
            may_go_on.set()
            await waiting
            answer = await echoed
            choice = events(answer.text)[0]["choices"][0] if stream else answer.json()["choices"][0]
            assert len(choice["logprobs"]["tokens"]) == 150 + (0 if stream else NUM_NEW)

    @pytest.mark.parametrize(("as_ids", "num_new"), [(False, NUM_NEW), (True, NUM_NEW), (True, 0), (True, 1)])
    def test_echo(
        self, model_folder: Path, story: list[int], tokenizer: Tokenizer, as_ids: bool, num_new: int
    ) -> None:
        """As lm-eval scores too, which has one token at most generated, and does not look at it."""
        story = story[:num_new]
        prompt_ids = byte_level_tokenizer().encode("The quick").ids
        body = {**COMPLETION, "echo": True, "logprobs": 0, "max_tokens": num_new}
        body["prompt"] = prompt_ids if as_ids else "The quick"
        answer, prefill = run(model_folder, "/v1/completions", body)
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        assert choice["text"] == byte_level_tokenizer().decode([*prompt_ids, *story])
        assert logprobs["tokens"] == [tokenizer.token_text(token) for token in [*prompt_ids, *story]]
        of_prompt = [value(i - 1000) for i in range(1, len(prompt_ids))]
        assert logprobs["token_logprobs"] == [None, *of_prompt, *map(value, range(num_new))]
        assert logprobs["top_logprobs"][0] is None
        for offset, text in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"][offset:].startswith(text)
        assert prefill.all(Prefill)[0].work.params.logprobs == LogprobParams(start_len=0)

    def test_a_streamed_echo_comes_first(self, model_folder: Path) -> None:
        whole, _ = run(model_folder, "/v1/completions", {**COMPLETION, "echo": True})
        seen, _ = run(model_folder, "/v1/completions", {**COMPLETION, "echo": True, "stream": True})
        choices = [event["choices"][0] for event in seen]
        assert choices[0]["text"] == "The quick"
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        for name, expected in whole["choices"][0]["logprobs"].items():
            assert list(itertools.chain(*(choice["logprobs"][name] for choice in choices))) == expected


async def test_the_logprobs_of_an_answer_are_bounded() -> None:
    """Of all its sequences together, here with 1,025 numbers for each token."""
    fleet, num_tokens = SeenFleet(1), MAX_ANSWER_LOGPROBS // 1025
    for node in fleet.nodes:
        node.limits = NodeLimits(1 << 20, 1 << 20, 64)
    wanted = LogprobParams(token_ids=tuple(range(1024)))
    work = Work((1,), SamplingParams(max_new_tokens=num_tokens + 9, logprobs=wanted))
    prompt = Prompt(rid="a", work=work, options=AnswerOptions(n=2))
    admissions = Admissions(fleet.dispatcher.queue, 2, lambda: None)
    generator, admission = Generator(fleet.dispatcher, admissions), admissions.beside_the_queue()
    admission.take(["a"], [2], whole=None, shared=False)
    async with generator.open([prompt], Tokenizer(sample("gpt2")), admission) as group:
        steps = group.steps()
        first, second = group.generations
        for generation, num in ((first, num_tokens - 9), (first, 9), (second, 1)):
            logprobs = Logprobs(bytes(4 * num), of_token_ids=bytes(4 * 1024 * num))
            fleet.tell(generation.req, *[65] * num, logprobs=logprobs)
            if generation is first:
                await anext(steps)
        assert len(first.output_logprobs) == num_tokens
        with pytest.raises(RequestError, match="logprobs"):
            await anext(steps)
