"""Recorded outputs of models, through the parsers of their families: the fixtures of canitoolcall."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from router.text.reply_parser import ReplyRegions, reply_formats

FAMILIES = {
    "deepseek-v3-": "deepseekv31",
    "deepseek-v3.1": "deepseekv31",
    "deepseek-": "deepseek_v32",
    "gemma-4": "gemma4",
    "glm-": "glm45",
    "gpt-oss": "gpt-oss",
    "kimi-k2": "kimi_k2",
    "llama-4": "llama4",
    "llama-3": "llama3",
    "magistral": "mistral",
    "ministral": "mistral",
    "mistral": "mistral",
    "devstral": "mistral",
    "qwen3-coder": "qwen3_coder",
    "qwen3.": "qwen3_coder",
    "qwen3-": "hermes",
}
"""By the beginning of a model's name, the more special ones first."""
CUT = "the arguments of a call that max_tokens has cut off are told as far as they came"
TOLD = "the arguments had been told before they turned out not to be JSON"
MARK = "the string that ends a call stands in an argument, behind what may end a call"
KNOWN = {
    "deepseek/sglang-v4-self-closing-invoke": "a tag that closes itself is text",
    "deepseek/vllm-v3-malformed-missing-brace": TOLD,
    "deepseek/v3-truncated-mid-arguments": CUT,
    "deepseek/v31-truncated-mid-arguments": CUT,
    "gemma4/bug-ollama-18390-key-with-spaces": "transformers reads no key with a space",
    "gemma4/edge-values-key-with-space": "transformers reads no key with a space",
    "gemma4/marker-in-arguments": MARK,
    "glm/glm47-missing-last-close-arg-value": "the tag that ends the last argument is missing",
    "gpt-oss/harmony-marker-in-arguments": MARK,
    "gpt-oss/harmony-truncated-in-arguments": CUT,
    "kimi/k2i-vllm-noise-between-markers": "text between two calls is content",
    "kimi/k26-truncated-inside-arguments": CUT,
    "llama/l3-truncated-inside-parameters": CUT,
    "mistral/v13think-truncated-in-arguments": CUT,
    "mistral/vllm-v11-think-text": "the family reasons between [THINK] and [/THINK] alone",
    "qwen3-hermes/bug-sglang-30480-truncated-mid-arguments": CUT,
    "qwen3-hermes/truncated-mid-arguments-no-thinking": CUT,
    "qwen3-hermes/truncated-mid-arguments-thinking": CUT,
    "qwen3-hermes/truncated-second-parallel-call": CUT,
    "qwen3-hermes/vllm-invalid-json-missing-brace": TOLD,
}
"""The fixtures that fail, and why. docs/http.md has this list."""


def family_of(fixture: Fixture) -> str | None:
    name = fixture.reference_model.lower().rpartition("/")[2].removeprefix("meta-")
    return next((family for prefix, family in FAMILIES.items() if name.startswith(prefix)), None)


SUPPORTED = [fixture for fixture in load_fixtures() if family_of(fixture) is not None]
MODELS = {family.slug: family for family in load_families().values()}


def prompt_of(fixture: Fixture) -> str:
    if fixture.generation_prompt is not None:
        return fixture.generation_prompt
    models = MODELS[fixture.family].reference_models
    found = [model.default_generation_prompt for model in models if model.repo == fixture.reference_model]
    return next(iter(found), None) or ""


def parse(fixture: Fixture, pieces: Sequence[str]) -> ParseResult:
    form = reply_formats()[family_of(fixture) or ""]
    regions = ReplyRegions(
        form=form,
        has_calls=True,
        reasons=True,
        in_reasoning=prompt_of(fixture).rstrip().endswith(form.think[0].rstrip()),
        tools=[dict(tool) for tool in fixture.tools],
    )
    reader, calls = regions.reader(), list[list[str]]()
    content = reasoning = ""
    for at, piece in enumerate(pieces, 1):
        end = "" if at == len(pieces) else None
        said = reader.feed([piece], end, is_cut=fixture.truncated)
        content, reasoning = content + said.content, reasoning + said.reasoning
        for call in said.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[-1][1] += call.arguments
    told = tuple(ParsedToolCall(name=name, arguments_raw=arguments) for name, arguments in calls)
    return ParseResult(content=content or None, reasoning_content=reasoning or None, tool_calls=told)


def status_of(fixture: Fixture) -> Status:
    seen = Observation(nonstream=parse(fixture, [fixture.raw_output]), streams={})
    return case_status(run_checks(fixture, MODELS[fixture.family], seen))


@pytest.mark.parametrize("fixture", SUPPORTED, ids=lambda fixture: fixture.id)
def test_what_a_model_has_written(fixture: Fixture) -> None:
    passes = status_of(fixture) in (Status.PASS, Status.SOFT_PASS)
    assert passes == (fixture.id not in KNOWN)
    text, draw = fixture.raw_output, random.Random(fixture.id)
    whole = parse(fixture, [text])
    assert parse(fixture, [*text]) == whole
    for most in (2, 5, 20):
        pieces = [""]
        for char in text:
            if len(pieces[-1]) >= draw.randint(1, most):
                pieces.append("")
            pieces[-1] += char
        assert parse(fixture, pieces) == whole


def test_at_least_95_of_100_pass() -> None:
    assert set(KNOWN) <= {fixture.id for fixture in SUPPORTED}
    assert len(KNOWN) <= 0.05 * len(SUPPORTED)
