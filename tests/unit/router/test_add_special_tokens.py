"""The special tokens that a tokenizer puts around a prompt, such as the BOS, and how a client leaves them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.protocol.messages import Prefill
from tests.unit.router.fakes import joined_pair, write_model
from tests.unit.router.sample_tokenizers import llama3

BOS = "<|bos|>"
ONE, WITHOUT = {"max_new_tokens": 1}, {"add_special_tokens": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer puts a BOS before a text."""
    folder, tokenizer = write_model(tmp_path_factory.mktemp("bos")), llama3()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size()}))
    return folder


async def test_a_text_gets_them_unless_it_is_told_otherwise(folder: Path) -> None:
    tokenizer = llama3()
    bos = tokenizer.token_to_id(BOS)
    async with joined_pair(folder) as ((prefill, _), _, client):

        async def sent(path: str, body: dict[str, Any]) -> list[list[int]]:
            """The prompts that reach the prefill node."""
            prefill.heard.clear()
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return sorted([*message.work.input_ids] for message in prefill.all(Prefill))

        for given, has_bos in (({}, True), ({"add_special_tokens": None}, True), (WITHOUT, False)):
            for texts in ("The fox", ["The fox", "größer"]):
                several = [texts] if isinstance(texts, str) else texts
                wanted = sorted(tokenizer.encode(text, add_special_tokens=has_bos).ids for text in several)
                assert all((ids[0] == bos) == has_bos for ids in wanted)
                assert await sent("/generate", {"text": texts, "sampling_params": ONE, **given}) == wanted
                assert await sent("/v1/completions", {"prompt": texts, "max_tokens": 1, **given}) == wanted
            # In a prompt the string is the token, which comes after the one that is added (docs/http.md).
            prompt = {"prompt": f"{BOS}The", "max_tokens": 1, **given}
            (ids,) = await sent("/v1/completions", prompt)
            assert ids.count(bos) == 1 + has_bos

        for given in ({"add_special_tokens": None}, WITHOUT):
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **given}
            (ids,) = await sent("/v1/chat/completions", chat)
            assert bos not in ids, "a chat has those of its template"
