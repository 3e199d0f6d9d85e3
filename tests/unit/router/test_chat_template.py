"""Prompts are what transformers' own apply_chat_template makes of the same messages.

The templates in chat_templates/ have the constructs of those that the model families come with, with shorter words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from router.text.chat_template import ChatTemplate, load_chat_template
from shared.errors import ConfigError, RequestError

FOLDER = Path(__file__).parent / "chat_templates"
FAMILIES = ["llama31", "qwen25", "qwen3", "mistral", "gptoss"]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter, 天気 & <more>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "days": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"day": {"type": ["integer", "null"]}},
                            "required": ["day"],
                        },
                    },
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {}}},
]
QUESTION = [
    {"role": "system", "content": " be brief "},
    {"role": "user", "content": "Is it <b>warm</b> in Zürich?\n"},
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"degrees": 21}'}
AFTER_A_CALL = [*QUESTION, CALL, RESULT, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL_TOKENS, origin="test")


def as_transformers(source: str, messages: list[Any], **options: Any) -> str:
    options = {"add_generation_prompt": True, **options}
    rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIAL_TOKENS, **options)
    assert isinstance(rendered[0], str)
    return rendered[0]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", [QUESTION, AFTER_A_CALL], ids=["question", "after-a-call"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_equal_those_of_transformers(
    family: str, messages: list[Any], tools: list[Any] | None
) -> None:
    source = (FOLDER / f"{family}.jinja").read_text()
    expected = as_transformers(source, messages, tools=tools)
    assert template_of(source).render(messages, tools=tools) == expected
    assert ("天気" in expected) == (tools is not None)
    assert "Zürich?" in expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ending", ["Well, ", "Well,\n", "Well"])
def test_the_last_message_is_continued_as_by_transformers(family: str, ending: str) -> None:
    source = (FOLDER / f"{family}.jinja").read_text()
    messages = [*QUESTION, {"role": "assistant", "content": ending}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    expected = as_transformers(source, messages, **options)
    assert template_of(source).render(messages, **options) == expected
    assert expected.rstrip().endswith(ending.rstrip())


def test_what_templates_may_use() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}{% set x = 5 %}[{{ x }}]{% endgeneration %}{{ x }}"
        "{% for d in documents %}{{ d.title }}: {{ d | tojson(indent=1, sort_keys=true) }}{% endfor %}"
        "{% set ns = namespace(found=false) %}{% set ns.found = dict(a=1).a %}{{ ns.found }}"
        "{{ strftime_now('%Y') | length }}{{ fancy }}{{ bos_token }}"
    )
    documents = [{"title": "größer", "text": "a & b"}]
    expected = as_transformers(source, QUESTION, documents=documents, fancy="yes")
    rendered = template_of(source).render(QUESTION, documents=documents, variables={"fancy": "yes"})
    assert rendered == expected
    assert "größer" in expected and "[5]" in expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "refused the messages"),
        ("{{ messages[7].role }}", "refused the messages"),
        ("{{ 'a' + 1 }}", "refused the messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'text' | dictsort }}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "refused the messages"),
        ("{% macro f(x) %}{{ f([x]) }}{% endmacro %}{{ f(messages) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages"),
    ],
)
def test_a_template_that_objects_or_breaks_is_a_bad_request(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        template_of(source).render(QUESTION)
    assert raised.value.status == 400 and raised.value.param == "messages"


def test_developer_messages_are_system_messages_to_templates_that_do_not_know_them() -> None:
    messages = [{"role": "developer", "content": "be brief"}]
    assert template_of("{{ messages[0].role }}").render(messages) == "system"
    knows = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert template_of(knows).render(messages) == "yes"
    assert messages[0]["role"] == "developer"


def test_a_model_may_have_a_template_for_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    named = load_chat_template(tmp_path, None)
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    in_files = load_chat_template(tmp_path, None)
    override = tmp_path / "mine.jinja"
    override.write_text("mine")
    overridden = load_chat_template(tmp_path, override)
    for template, expected in [(named, "tools"), (in_files, "tools"), (overridden, "mine")]:
        assert template is not None
        assert template.render(QUESTION, tools=TOOLS) == expected
        assert template.render(QUESTION) == ("mine" if expected == "mine" else "plain")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates[1:]}))
    (tmp_path / "chat_template.jinja").unlink()
    assert load_chat_template(tmp_path, None) is None
    override.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"mine\.jinja"):
        load_chat_template(tmp_path, override)
