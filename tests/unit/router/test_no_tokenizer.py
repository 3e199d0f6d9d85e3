"""A router with --skip-tokenizer-init, for a model folder that has a config.json and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import pytest

from router.config import HttpOptions
from router.text.tokenizer import Tokenizer
from shared.errors import ModelError
from tests.unit.router.fakes import events, joined_pair

SKIP = HttpOptions(port=0, served_model_name="tiny", skip_tokenizer_init=True)
GREEDY = {"max_new_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def bare_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    shutil.copy(model_folder / "config.json", folder)
    return folder


def test_the_flag_is_named_where_the_tokenizer_is_missing(bare_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing.*--skip-tokenizer-init"):
        Tokenizer.load(bare_folder)


def test_logprobs_name_tokens_by_their_ids() -> None:
    """The top logprobs of a completion have texts as keys, so equal texts would hide all but one."""
    assert Tokenizer(None).token_text(7) == "token_id:7"


async def test_token_ids_are_answered_with_token_ids(bare_folder: Path) -> None:
    async with joined_pair(bare_folder, http=SKIP) as ((prefill, _), _, client):
        body = {"input_ids": [5, 6, 7], "sampling_params": GREEDY}
        answer = (await client.post("/generate", json=body)).json()
        assert answer["output_ids"] == prefill.story[:5]
        assert answer["text"] == ""
        streamed = await client.post("/generate", json={**body, "stream": True})
        last = cast(dict[str, object], events(streamed.text)[-2])
        assert (last["output_ids"], last["text"]) == (prefill.story[:5], "")
        completion = await client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 5})
        assert completion.json()["choices"][0]["text"] == ""
        assert completion.json()["usage"]["completion_tokens"] == 5


async def test_what_needs_a_tokenizer_is_refused(bare_folder: Path) -> None:
    async with joined_pair(bare_folder, http=SKIP) as (_, _, client):
        for path, body, reason in (
            ("/generate", {"text": "hello"}, "a text needs a tokenizer (--skip-tokenizer-init): give token"),
            ("/v1/completions", {"prompt": "hello"}, "a text needs a tokenizer"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "chat template"),
            ("/tokenize", {"prompt": "hello"}, "a text needs a tokenizer"),
            ("/generate", {"input_ids": [5], "sampling_params": {"stop": "end"}}, "give stop_token_ids"),
            ("/generate", {"input_ids": [5], "sampling_params": {"stop_regex": "a+"}}, "a stop string needs"),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert reason in response.text
