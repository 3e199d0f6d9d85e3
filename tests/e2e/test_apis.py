"""What clients of both dialects get from a running service, streamed and not. The model's text is full of half
characters, since it was never trained."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from shared.protocol.sampling_params import SamplingParams, TokenBias
from tests.golden.references import Zoo, reference_tokens
from tests.modelzoo import reference_greedy, reference_logits
from tests.processes import Fleet, Router

pytestmark = pytest.mark.processes

PROMPT = "A router takes the request and counts its words; a prefill node reads"
STREAM_GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


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


def test_a_stop_string_is_never_shown(router: Router) -> None:
    text = router.generate(PROMPT, 64).finish().answer["text"]
    stop = text[len(text) // 2 :][:3]
    expected = text[: text.index(stop)]
    for stream in (False, True):
        call = router.generate(PROMPT, 64, stream=stream, sampling={"stop": stop}).finish()
        assert call.last["text"] == expected
        assert call.last["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert all(expected.startswith(event["text"]) for event in call.events)


def test_a_batch_is_streamed_by_index(router: Router, folder: Path) -> None:
    prompts = [[5, 6, 7] * n for n in (3, 9, 12)]
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
    streamed = router.post("/generate", {**body, "input_ids": prompts, "stream": True}).finish()
    last = {event["index"]: event["output_ids"] for event in streamed.events}
    whole = router.post("/generate", {**body, "input_ids": prompts}).finish().answer
    expected = [reference_greedy(folder, ids, 12) for ids in prompts]
    assert [last[index] for index in range(3)] == expected
    assert [answer["output_ids"] for answer in whole] == expected


def test_n_choices_are_drawn_with_seeds_in_a_row(router: Router) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.95, "sampling_seed": 41}
    both = router.generate(PROMPT, 24, sampling={**sampling, "n": 2}).finish().answer
    assert len(both) == 2 and both[0]["output_ids"] != both[1]["output_ids"]
    for choice, answer in enumerate(both):
        alone = router.generate(PROMPT, 24, sampling={**sampling, "sampling_seed": 41 + choice}).finish()
        assert alone.token_ids == answer["output_ids"]
    streamed = router.generate(PROMPT, 24, stream=True, sampling={**sampling, "n": 2}).finish()
    last = {event["index"]: event["output_ids"] for event in streamed.events}
    assert [last[0], last[1]] == [answer["output_ids"] for answer in both]


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


def test_openai_completions(router: Router, client: openai.OpenAI) -> None:
    native = router.generate(PROMPT, 40).finish().answer
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, **STREAM_GREEDY)
    assert whole.choices[0].text == native["text"]
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == native["meta_info"]["prompt_tokens"]
    assert whole.usage.completion_tokens == 40

    stream = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        **STREAM_GREEDY,
    )
    events = list(stream)
    assert "".join(event.choices[0].text for event in events if event.choices) == native["text"]
    assert [event.usage.completion_tokens for event in events if event.usage] == [40]
    assert not events[-1].choices


def test_openai_chat(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Which node writes the answer?"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=40, **STREAM_GREEDY)
    text = whole.choices[0].message.content
    assert text and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    rendered = "<|im_start|>user\nWhich node writes the answer?<|im_end|>\n<|im_start|>assistant\n"
    same = client.completions.create(model="tiny", prompt=rendered, max_tokens=40, **STREAM_GREEDY)
    assert same.choices[0].text == text

    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=40, stream=True, **STREAM_GREEDY
    )
    deltas = [event.choices[0].delta for event in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == text


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


@pytest.mark.parametrize(
    ("field", "grammar", "pattern"),
    [
        ("regex", "[a-f]{4}-[0-9]{2}", "[a-f]{4}-[0-9]{2}"),
        ("ebnf", 'root ::= "yes" | "no" | "may" "be"', "yes|no|maybe"),
        ("json_schema", '{"enum": ["a", 17]}', '"a"|17'),
    ],
)
def test_grammars(router: Router, field: str, grammar: str, pattern: str) -> None:
    params = {"temperature": 1.0, "sampling_seed": 2, "ignore_eos": True, field: grammar}
    answer = router.generate(PROMPT, 60, sampling=params).finish().answer
    assert re.fullmatch(pattern, answer["text"].strip())
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_in_a_batch_is_named_with_the_compilers_words(router: Router, stream: bool) -> None:
    params = [{"max_new_tokens": 5}, {"max_new_tokens": 5, "regex": "(a"}]
    body = {"text": [PROMPT, PROMPT], "stream": stream, "sampling_params": params}
    call = router.post("/generate", body).finish()
    assert call.status == 400 and call.error is not None
    assert "prompt 1: sampling_params[1].regex" in call.error and "parenthesis is not closed" in call.error


def test_penalties_and_biases(router: Router, folder: Path) -> None:
    """Alone and streamed beside others, as the plain loop samples."""
    ids = [5, 6, 7] * 12
    sampling = {
        "frequency_penalty": 0.8,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "temperature": 0.9,
        "sampling_seed": 21,
    }
    native = {**sampling, "logit_bias": {"77": 9, "200": -100}}
    params = SamplingParams(
        max_new_tokens=20,
        ignore_eos=True,
        seed=21,
        logit_bias=(TokenBias(77, 9.0), TokenBias(200, -100.0)),
        **{name: x for name, x in sampling.items() if name != "sampling_seed"},  # type: ignore[arg-type]
    )
    expected = reference_tokens(folder, ids, params)
    calls = [router.generate(ids, 20, sampling=native, stream=stream) for stream in (False, True)]
    calls += [router.generate(PROMPT, 30)]
    assert [call.finish().token_ids for call in calls[:2]] == [expected] * 2
    calls[2].finish()


def test_logprobs(router: Router, client: openai.OpenAI, folder: Path) -> None:
    """Scored with the prefix cached and not, by /generate, and by the openai package with echo and in a chat."""
    expected: list[float] = []
    for _ in range(2):
        call = router.generate(PROMPT, 6, return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
        answer = call.finish().answer
        meta = answer["meta_info"]
        ids = [token for _, token, _ in meta["input_token_logprobs"]]
        all_ids = [*ids, *answer["output_ids"]]
        logprobs = torch.log_softmax(reference_logits(folder, all_ids), dim=-1)
        expected = [logprobs[i - 1, all_ids[i]].item() for i in range(1, len(all_ids))]
        found = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
        assert found[0][0] is None
        assert [logprob for logprob, _, _ in found[1:]] == pytest.approx(expected, abs=1e-3)
        for (logprob, _, _), top in zip(
            meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
        ):
            assert top[0][0] == logprob  # greedy

    scored = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, logprobs=1, echo=True, **STREAM_GREEDY
    ).choices[0]
    assert scored.text == PROMPT + answer["text"]
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)

    chat: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Which?"}],
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
        **STREAM_GREEDY,
    }
    whole = client.chat.completions.create(**chat).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert len(whole.logprobs.content) == 12
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in whole.logprobs.content)
    events = [event.choices[0] for event in client.chat.completions.create(**chat, stream=True)]
    told = [entry for event in events if event.logprobs for entry in event.logprobs.content or ()]
    assert [entry.logprob for entry in told] == pytest.approx(
        [entry.logprob for entry in whole.logprobs.content], abs=1e-4
    )


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="another"):
        client.completions.create(model="another", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model="tiny", prompt=[5] * 600)
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_probes_and_metrics(router: Router) -> None:
    assert router.get("/health_generate")[0] == 200
    assert router.get("/get_model_info")[1]["is_generation"] is True
    _, text = router.get("/metrics")
    assert "baton:kv_transfer_bytes_total" in text
    assert "sglang:num_running_reqs" in text
