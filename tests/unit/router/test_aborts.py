"""/abort_request finds a request from before it is tokenized, and only the one that has the name."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from router.dispatch.fleet_view import WaitingQueue
from router.request.admission import Admissions
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.protocol.messages import Decode, Prefill
from tests.patience import eventually
from tests.unit.router.fake_node import one_then_nothing
from tests.unit.router.fakes import joined_pair


class HeldTokenizer:
    """Encodes when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release, self.num_waiting = asyncio.Event(), 0
        encode = Tokenizer.encode

        async def held(tokenizer: Tokenizer, texts: list[str], **options: bool) -> list[list[int]]:
            self.num_waiting += 1
            await self.release.wait()
            return await encode(tokenizer, texts, **options)

        monkeypatch.setattr(Tokenizer, "encode", held)

    async def wait_for(self, num_waiting: int) -> None:
        await eventually(lambda: self.num_waiting >= num_waiting)


async def aborted(client: httpx.AsyncClient, **body: object) -> int:
    num: int = (await client.post("/abort_request", json=body)).json()["aborted"]
    return num


@pytest.mark.parametrize("body", [{"rid": "job"}, {"abort_all": True}], ids=["by name", "all"])
async def test_a_request_that_waits_for_the_tokenizer_is_aborted(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, object]
) -> None:
    async with joined_pair(model_folder) as ((prefill, decode), _, client):
        tokenizer = HeldTokenizer(monkeypatch)
        asked = asyncio.create_task(client.post("/generate", json={"text": ["a", "b"], "rid": "job"}))
        chat = {"prompt": "a", "model": "tiny", "rid": "job2", "stream": True}
        other = asyncio.create_task(client.post("/v1/completions", json=chat))
        await tokenizer.wait_for(2)
        assert await aborted(client, **body) == (2 if "rid" in body else 3)
        assert await aborted(client, **body) == 0, "they were counted"
        tokenizer.release.set()
        answers = await asked
        assert answers.status_code == 200
        for answer in answers.json():
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert answer["text"] == "" and answer["meta_info"]["prompt_tokens"] == 1
        assert (await other).text.endswith("data: [DONE]\n\n")
        assert len(prefill.all(Prefill)) + len(decode.all(Decode)) <= (2 if "rid" in body else 0)
        assert (await client.post("/generate", json={"text": "a", "rid": "job"})).status_code == 200


async def test_one_prompt_of_a_batch_is_aborted_before_it_is_sent(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined_pair(model_folder) as (_, _, client):
        tokenizer = HeldTokenizer(monkeypatch)
        body = {"text": ["a", "b"], "rid": "job", "sampling_params": {"max_new_tokens": 4}}
        asked = asyncio.create_task(client.post("/generate", json=body))
        await tokenizer.wait_for(1)
        taken = await client.post("/generate", json={"text": "a", "rid": "job_1"})
        assert taken.status_code == 400, "the name is in use already"
        assert await aborted(client, rid="job_1") == 1
        tokenizer.release.set()
        first, second = (await asked).json()
        assert first["meta_info"]["finish_reason"]["type"] != "abort"
        assert second["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_name_that_begins_like_another_is_not_meant(model_folder: Path) -> None:
    async with joined_pair(model_folder, decode=one_then_nothing) as ((_, decode), _, client):
        asked = asyncio.create_task(client.post("/generate", json={"text": "a", "rid": "job_7"}))
        await decode.wait_for(Decode)
        assert await aborted(client, rid="job") == 0
        assert not asked.done()
        assert await aborted(client, rid="job_7") == 1
        assert (await asked).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_names_are_free_once_all_who_share_them_have_ended() -> None:
    admissions = Admissions(WaitingQueue(time.monotonic), 100, lambda: None)
    with admissions.admit() as first, admissions.admit() as second:
        first.take(["a_0", "a_1"], [1, 1], whole="a", shared=True)
        second.take(["a_0", "a_1"], [1, 1], whole="a", shared=True)
        first.release_rids()
        first.release_rids()
        for name in ("a", "a_1"):
            with pytest.raises(RequestError, match=name), admissions.admit() as third:
                third.take([name], [1], whole=name, shared=False)
        assert admissions.find("a") == admissions.find(None) == [second]
    assert (admissions.holders, admissions.num_queued) == ({}, 0)
    with pytest.raises(RequestError), admissions.admit() as admission:
        admission.take(["x", "x"], [1, 1], whole=None, shared=False)
    assert (admissions.holders, admissions.num_queued) == ({}, 0)
