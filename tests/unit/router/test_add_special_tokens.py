"""The special tokens that a tokenizer puts around a prompt, such as the BOS, and how a client leaves them out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.protocol.messages import Prefill
from tests.unit.router.fakes import joined_pair, write_model
from tests.unit.router.sample_tokenizers import llama3

BOS = "<|bos|>"
ONE = {"max_new_tokens": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer puts a BOS before a text."""
    folder, tokenizer = write_model(tmp_path_factory.mktemp("bos")), llama3()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size()}))
    return folder


def ask(folder: Path, path: str, body: dict[str, Any]) -> tuple[int, Any, list[list[int]]]:
    """The status, the answer, and the prompts that reached the prefill node."""

    async def run() -> tuple[int, Any, list[list[int]]]:
        async with joined_pair(folder) as (nodes, _, client):
            response = await client.post(path, json=body)
            sent = [[*message.work.input_ids] for message in nodes[0].all(Prefill)]
            return response.status_code, response.json(), sorted(sent)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "has_bos"),
    [({}, True), ({"add_special_tokens": None}, True), ({"add_special_tokens": False}, False)],
)
@pytest.mark.parametrize("texts", ["The fox", ["The fox", "größer"]], ids=["one", "several"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_text_gets_them_unless_it_is_told_otherwise(
    folder: Path, path: str, texts: str | list[str], given: dict[str, Any], has_bos: bool
) -> None:
    prompt = (
        {"text": texts, "sampling_params": ONE} if path == "/generate" else {"prompt": texts, "max_tokens": 1}
    )
    status, answer, sent = ask(folder, path, {**prompt, **given})
    assert status == 200, answer
    several = [texts] if isinstance(texts, str) else texts
    assert sent == sorted(llama3().encode(text, add_special_tokens=has_bos).ids for text in several)
    assert all((ids[0] == llama3().token_to_id(BOS)) == has_bos for ids in sent)


@pytest.mark.parametrize("add", [True, False])
def test_a_prompt_that_begins_with_the_bos(folder: Path, add: bool) -> None:
    """The string is the token in a prompt, and comes after the one that is added, as docs/http.md says."""
    status, _, sent = ask(
        folder, "/v1/completions", {"prompt": f"{BOS}The", "max_tokens": 1, "add_special_tokens": add}
    )
    assert status == 200
    assert sent[0].count(llama3().token_to_id(BOS)) == 1 + add


@pytest.mark.parametrize("value", [None, False])
def test_a_chat_gets_those_of_its_template(folder: Path, value: object) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "add_special_tokens": value}
    status, _, sent = ask(folder, "/v1/chat/completions", body)
    assert status == 200 and llama3().token_to_id(BOS) not in sent[0]
