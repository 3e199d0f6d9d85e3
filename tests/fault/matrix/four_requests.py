"""The four requests that every cell of the matrix serves at once: five sequences, all streamed.

greedy, one at temperature 1 with a seed, one under a grammar, and n = 2 with penalties and logprobs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.modelzoo import random_prompt
from tests.processes import Call, Router

NUM_NEW = 32
NUM_SEQS = 5
NUM_OWN = 40
"""Tokens of a prompt behind PREFIX."""
PREFIX = random_prompt(28, seed=1000)
"""All prompts begin so. The decode node that has cached it is chosen for all of them."""


def _body(number: int, **sampling: Any) -> dict[str, Any]:
    return {
        "input_ids": [*PREFIX, *random_prompt(NUM_OWN, seed=number)],
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True, **sampling},
        "stream": True,
    }


BODIES: Mapping[str, dict[str, Any]] = {
    "greedy": _body(1),
    "seeded": _body(2, temperature=1.0, sampling_seed=7),
    "grammar": _body(3, temperature=1.0, sampling_seed=8, regex="([a-z]{3} [0-9]{2}, ){100}"),
    "n2": {
        **_body(4, n=2, temperature=1.0, sampling_seed=9, frequency_penalty=0.4, presence_penalty=0.2),
        "return_logprob": True,
        "top_logprobs_num": 2,
    },
}


@dataclass
class Answer:
    """What came of one sequence: its tokens, their logprobs, and how it ended."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str = ""


def start_four(router: Router, tag: str) -> dict[str, Call]:
    """Send all four; their rids end in `tag`."""
    return {
        name: router.post("/generate", {**body, "rid": rids(name, tag)[0]}) for name, body in BODIES.items()
    }


def rids(name: str, tag: str) -> list[str]:
    """The rid of a request."""
    return [f"{name}-{tag}"]


def answers(name: str, call: Call) -> list[Answer]:
    """The answer of each sequence, of which every event must continue the one before."""
    sequences: dict[int, Answer] = {}
    for event in call.events:
        assert "error" not in event, f"{name}: {json.dumps(event)}"
        answer = sequences.setdefault(event.get("index", 0), Answer())
        ids, meta = event["output_ids"], event["meta_info"]
        assert ids[: len(answer.output_ids)] == answer.output_ids, f"{name}: a position changed: {ids}"
        assert len(ids) == meta["completion_tokens"] <= NUM_NEW, f"{name}: {meta}"
        assert not answer.finish, f"{name}: an event after the end"
        answer.output_ids = ids
        answer.logprobs = [*meta.get("output_token_logprobs", []), *meta.get("output_top_logprobs", [])]
        if meta.get("finish_reason"):
            answer.finish = meta["finish_reason"]["type"]
    return [sequences[index] for index in sorted(sequences)]


def finished(calls: Mapping[str, Call]) -> dict[str, list[Answer]]:
    """All answers, once every call has ended."""
    for name, call in calls.items():
        call.finish()
        assert call.status == 200 and not call.broken and call.saw_done, f"{name}: {call.describe()}"
    return {name: answers(name, call) for name, call in calls.items()}


def assert_same(
    got: Mapping[str, list[Answer]], expected: Mapping[str, list[Answer]], *, logprob_atol: float
) -> None:
    """Tokens, ends and logprobs are those of the undisturbed run."""
    for name, answer_list in got.items():
        assert len(answer_list) == len(expected[name]), name
        for answer, right in zip(answer_list, expected[name], strict=True):
            assert answer.output_ids == right.output_ids, f"{name}: {answer.output_ids} != {right.output_ids}"
            assert answer.finish == right.finish, name
            assert_close(name, answer.logprobs, right.logprobs, logprob_atol)


def assert_close(name: str, got: Any, right: Any, atol: float) -> None:
    """Equal in shape and tokens, and every logprob within the bound."""
    if isinstance(right, list):
        assert isinstance(got, list) and len(got) == len(right), f"{name}: {got} != {right}"
        for one, other in zip(got, right, strict=True):
            assert_close(name, one, other, atol)
    elif isinstance(right, float):
        assert math.isclose(got, right, rel_tol=0, abs_tol=atol), f"{name}: {got} != {right}"
    else:
        assert got == right, f"{name}: {got} != {right}"
