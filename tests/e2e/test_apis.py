"""What clients of both dialects get from a running service, streamed and not. The model's text is full of half
characters, since it was never trained."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.golden.references import Zoo
from tests.processes import Fleet, Router

pytestmark = pytest.mark.processes

PROMPT = "A router takes the request and counts its words; a prefill node reads"


@pytest.fixture(scope="module")
def folder(zoo: Zoo) -> Path:
    return zoo.folder("llama")


@pytest.fixture(scope="module")
def router(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    flags = ("--max-total-tokens", "8192", "--debug-checks")
    router_flags = ("--served-model-name", "tiny", "--local-prefill-tokens", "0")
    logs = tmp_path_factory.mktemp("apis")
    with Fleet(logs, folder, flags=flags, router_flags=router_flags) as fleet:
        yield fleet.router
        fleet.router.wait_home()
        fleet.stop()


def test_a_stream_adds_up_to_the_answer(router: Router) -> None:
    whole = router.generate(PROMPT, 64).finish().answer
    assert "�" in whole["text"]  # text to be careful with
    for _ in range(2):  # the second time with the prefix cached
        call = router.generate(PROMPT, 64, stream=True).finish()
        texts = [event["text"] for event in call.events]
        assert call.saw_done and len(texts) > 1
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert texts[-1] == whole["text"]
        assert call.token_ids == whole["output_ids"]
        unfinished = [event["meta_info"]["finish_reason"] for event in call.events[:-1]]
        assert set(unfinished) == {None}
        assert call.last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_the_timeline_goes_through_both_fleets(router: Router) -> None:
    call = router.generate(PROMPT, 8, return_timeline=True).finish()
    stamps = [(stamp["role"], stamp["stage"]) for stamp in call.last["meta_info"]["timeline"]]
    times = [stamp["time"] for stamp in call.last["meta_info"]["timeline"]]
    assert times == sorted(times)
    assert stamps[0] == ("router", "queued")
    assert stamps[-1] == ("router", "finished")
    for role, stages in {
        "prefill": ["queued", "prefilling", "transferring"],
        "decode": ["queued", "transferring", "decoding", "finished"],
    }.items():
        assert [stage for who, stage in stamps if who == role] == stages


@pytest.mark.parametrize("prompt", [PROMPT, "short"], ids=["split", "local"])
def test_a_stream_tells_the_stages_before_its_end(router: Router, prompt: str) -> None:
    call = router.generate(prompt, 160, stream=True, return_timeline=True).finish()
    told = [
        {(stamp["role"], stamp["stage"]) for stamp in event["meta_info"]["timeline"]} for event in call.events
    ]
    assert ("router", "finished") in told[-1]
    running = [stages for stages in told if ("decode", "finished") not in stages]
    assert any(("decode", "decoding") in stages for stages in running), "its node said so before it finished"
    assert all(before <= after for before, after in itertools.pairwise(told))


def test_a_tool_that_has_to_be_called(client: openai.OpenAI) -> None:
    """The model has never seen a tool: it is the grammar that makes its text a call."""
    city = {"type": "string", "enum": ["Bonn", "Zürich"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tools: Any = [
        {"type": "function", "function": {"name": "weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "now"}},
    ]
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Warm?"}],
        "tools": tools,
    }
    weather = {"type": "function", "function": {"name": "weather"}}
    for choice in (weather, "required"):
        answered = client.chat.completions.create(**asked, tool_choice=choice, max_tokens=200).choices[0]
        assert answered.message.tool_calls is not None
        call = answered.message.tool_calls[0]
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments["city"] in city["enum"]
        else:
            assert (choice, call.function.name, arguments) == ("required", "now", {})


def test_streams_keep_to_a_schema(client: openai.OpenAI) -> None:
    tags = {"type": "array", "items": {"enum": ["slow", "fast"]}, "minItems": 1, "maxItems": 3}
    properties = {"name": {"type": "string", "maxLength": 12}, "tags": tags}
    schema = {"type": "object", "properties": properties, "required": ["name", "tags"]}
    asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    choices = {"temperature": 1, "seed": 1, "n": 2, "extra_body": {"response_format": asked}}
    events = list(
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=400, stream=True, **choices)
    )
    for index in range(2):
        pieces = [e.choices[0] for e in events if e.choices[0].index == index]
        assert len(pieces) > 1 and [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        found = json.loads("".join(piece.text for piece in pieces))
        assert list(found) == ["name", "tags"] and len(found["name"]) <= 12
        assert 1 <= len(found["tags"]) <= 3 and set(found["tags"]) <= {"slow", "fast"}
