"""OpenAI's answers in all their forms are what the official client's types say, with nothing missing or made up."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from shared.protocol.logprobs import Logprobs
from shared.protocol.messages import Decode, Finish, Prefill, ReqReport, TokenEntry, Tokens
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.fakes import events, joined_pair
from tests.unit.router.scoring import scored_first_token, scored_story

OWN = {"matched_stop", "root", "max_model_len"}
"""Fields beyond OpenAI's."""
HI = [{"role": "user", "content": "hi"}]


def score(seed: int) -> float:
    """What a sequence's tokens are worth: of four in a row, the third is the likeliest."""
    return {0: -3.0, 1: -2.0, 2: -1.0, 3: -4.0}[seed % 4]


async def scored_by_seed_first(node: FakeNode, message: Prefill | Decode) -> None:
    """A script."""
    await scored_by_seed(node, message, num_tokens=1)


async def scored_by_seed(node: FakeNode, message: Prefill | Decode, num_tokens: int | None = None) -> None:
    """A script."""
    wanted = message.work.params.max_new_tokens
    for position in range(wanted if num_tokens is None else num_tokens):
        finish = Finish("length") if position == wanted - 1 else None
        asked = message.work.params.logprobs
        logprobs = Logprobs(struct.pack("<f", score(message.work.params.seed))) if asked else None
        token = (message.work.params.seed % 4 + 40,)
        node.send(Tokens((TokenEntry(message.key, position, token, finish, ReqReport(), logprobs, None),)))


def check(kind: type[BaseModel], told: dict[str, Any]) -> None:
    """It parses, and says nothing that the type does not know but what is OWN."""
    if (
        kind is Completion
    ):  # the type forgets what OpenAI's own answers have: nulls for what there is nothing to say
        for choice in told["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            scored = choice["logprobs"] or {}
            scored["token_logprobs"] = [logprob or 0.0 for logprob in scored.get("token_logprobs", ())]
            scored["top_logprobs"] = [top or {} for top in scored.get("top_logprobs", ())]
    parsed = kind.model_validate_json(json.dumps(told), strict=False)

    def unknown(value: object) -> set[str]:
        if isinstance(value, BaseModel):
            inner = (getattr(value, name) for name in type(value).model_fields)
            return set(value.model_extra or {}).union(*map(unknown, inner))
        return set().union(*map(unknown, value)) if isinstance(value, list) else set()

    assert unknown(parsed) <= OWN


async def test_answers_are_of_the_clients_types(model_folder: Path) -> None:
    async with joined_pair(model_folder, prefill=scored_first_token, decode=scored_story) as (_, _, client):
        for chat, logprobs, stream in itertools.product((False, True), repeat=3):
            body: dict[str, Any] = {"messages": HI} if chat else {"prompt": ["hi", "you"], "echo": True}
            if logprobs:
                body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
            body |= {"stream_options": {"include_usage": True}, "max_tokens": 4, "n": 2, "stream": stream}
            answer = await client.post(f"/v1/{'chat/' * chat}completions", json=body)
            assert answer.status_code == 200, answer.text
            if not stream:
                check(ChatCompletion if chat else Completion, answer.json())
                continue
            *told, done = events(answer.text)
            assert done == "[DONE]"
            for event in told:
                for choice in event["choices"]:
                    if not chat and choice["finish_reason"] is None:
                        choice["finish_reason"] = "stop"  # OpenAI's type forgets that it may be null
                check(ChatCompletionChunk if chat else Completion, event)


async def test_the_likeliest_of_several_are_told(model_folder: Path) -> None:
    scripts = {"prefill": scored_by_seed_first, "decode": scored_by_seed}
    async with joined_pair(model_folder, **scripts) as (_, _, client):
        for n in (1, 2, 4):
            body = {"prompt": ["hi", "you"], "n": n, "best_of": 4, "max_tokens": 3, "seed": 4}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(2 * n))
            letters = [choice["text"][0] for choice in answer["choices"]]
            best = sorted(range(4), key=score, reverse=True)
            if n == 4:
                best = list(range(4))  # nothing to choose from: in the order of the seeds
            first = ord(letters[0]) - best[0]
            assert letters == [chr(first + seed) for seed in best[:n]] * 2
            assert all(choice["logprobs"] is None for choice in answer["choices"])
            assert answer["usage"]["completion_tokens"] == 2 * 4 * 3


async def test_models_are_of_the_clients_types(model_folder: Path) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        check(Model, (await client.get("/v1/models/tiny")).json())
