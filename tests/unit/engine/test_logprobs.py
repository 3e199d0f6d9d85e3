"""Logprobs of prompt and output tokens against float64, each request's share cut out of its batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.config import CacheOptions
from shared.engine.build import make_ledger
from shared.engine.logprobs import RawLogprobs, prompt_logprobs
from shared.engine.model_worker_batch import ModelWorkerBatch, snapshot
from shared.engine.sampler import sample
from shared.protocol.logprobs import LogprobParams, Logprobs, TokenLogprobs
from shared.protocol.messages import ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams, TokenBias
from shared.scheduling.plan import ScheduleBatch, schedule
from shared.scheduling.req import Req
from shared.timeline import Timeline
from tests.unit.engine.naive_sampler import naive_logprobs

V = 40
WANTED = {
    "nothing": None,
    "own": LogprobParams(),
    "top": LogprobParams(top_num=3),
    "ids": LogprobParams(token_ids=(7, 0, 39)),
    "all": LogprobParams(top_num=5, token_ids=(1,)),
    "prompt": LogprobParams(start_len=0, top_num=2, token_ids=(5, 6)),
    "prompt_from_3": LogprobParams(start_len=3),
    "prompt_from_last": LogprobParams(start_len=9, top_num=1),
}


def make_req(name: str, number: int, num_ids: int = 10, **params: object) -> Req:
    sampling = SamplingParams(temperature=0.0, logprobs=WANTED[name], **params)  # type: ignore[arg-type]
    ids = tuple((7 * number + 3 * i) % V for i in range(num_ids))
    return Req(ReqKey("router", f"r{number}"), Work(ids, sampling), Timeline(Role.DECODE), 100)


class ExtendRig:
    def __init__(self, *names: str, **params: object) -> None:
        self.ledger = make_ledger(200, CacheOptions(page_size=4), max(len(names), 1), 512)
        self.reqs = [make_req(name, i, **params) for i, name in enumerate(names)]
        for req in self.reqs:
            req.kv = self.ledger.admit(self.ledger.match_prefix(req.ids, ""), "")
            assert req.kv is not None
            assert self.ledger.grow(req.kv, 64)

    def extend(self, *lengths: int) -> ModelWorkerBatch:
        """The next `lengths` tokens of each; who reaches the end of the prompt samples."""
        items = tuple(
            schedule(req, length, samples=req.kv_len + length == len(req.ids))
            for req, length in zip(self.reqs, lengths, strict=True)
        )
        return snapshot(ScheduleBatch(extends=items), self.ledger.rows, (), frozenset())


def check(found: TokenLogprobs, expected_V: np.ndarray, token_id: int, wanted: LogprobParams | None) -> None:
    assert wanted is not None
    assert found.logprob == pytest.approx(expected_V[token_id], abs=1e-5)
    by_rank = sorted(range(V), key=lambda i: -expected_V[i])
    assert [i for _, i in found.top] == by_rank[: wanted.top_num]
    of_likeliest = [expected_V[i] for i in by_rank[: wanted.top_num]]
    assert [x for x, _ in found.top] == pytest.approx(of_likeliest, abs=1e-5)
    assert list(found.of_token_ids) == pytest.approx([expected_V[i] for i in wanted.token_ids], abs=1e-5)


def test_each_output_token_gets_what_its_request_asked_for() -> None:
    world = ExtendRig(*WANTED)
    inputs = world.extend(*[10] * len(WANTED)).sampling.map(torch.from_numpy)
    logits = 3 * torch.randn(len(WANTED), V, generator=torch.Generator().manual_seed(1))
    assert inputs.logprobs is not None
    raw = RawLogprobs.of(logits, inputs.logprobs)
    token_ids = sample(logits.clone(), inputs)
    found = raw.gather(token_ids).by_owner()
    assert sorted(found) == list(range(1, len(WANTED)))
    for i, (name, wanted) in enumerate(WANTED.items()):
        if name != "nothing":
            (of_token,) = found[i].unpack()
            check(of_token, naive_logprobs(logits[i].numpy()), int(token_ids[i]), wanted)


def test_they_are_the_models_own() -> None:
    """A bias that forces a token does not make it look likely."""
    world = ExtendRig("own", logit_bias=(TokenBias(5, 100.0),))
    inputs = world.extend(10).sampling.map(torch.from_numpy)
    logits = torch.zeros(1, V)
    assert inputs.logprobs is not None
    raw = RawLogprobs.of(logits, inputs.logprobs)
    token_ids = sample(logits, inputs)
    assert token_ids.tolist() == [5]
    (of_token,) = raw.gather(token_ids).by_owner()[0].unpack()
    assert of_token.logprob == pytest.approx(-np.log(V))


@pytest.mark.parametrize("block", [V, 3 * V, 10**9], ids=["one_row", "three_rows", "all_rows"])
@pytest.mark.parametrize("chunks", [(10,), (1, 9), (4, 3, 3), (9, 1), tuple([1] * 10)], ids=str)
def test_prompt_logprobs_chunk_by_chunk(chunks: tuple[int, ...], block: int) -> None:
    """However the prompt is cut: the positions that were asked for, each once, in order."""
    names = list(WANTED)
    world = ExtendRig(*names)
    generator = torch.Generator().manual_seed(2)
    logits_of = [3 * torch.randn(10, V, generator=generator) for _ in names]
    collected: dict[int, list[Logprobs]] = {i: [] for i in range(len(names))}
    at = 0
    for length in chunks:
        inputs = world.extend(*[length] * len(names)).sampling.input_logprobs
        hidden = torch.cat([logits[at : at + length] for logits in logits_of])
        at += length
        if inputs is not None:
            hidden = hidden[inputs.rows_N]
            for owner, part in (
                prompt_logprobs(lambda rows: rows, hidden, inputs.map(torch.from_numpy), V).by_owner().items()
            ):
                collected[owner].append(part)
    for i, (name, req) in enumerate(zip(names, world.reqs, strict=True)):
        wanted = WANTED[name]
        found = [one for part in collected[i] for one in part.unpack()]
        start = wanted.start_len if wanted is not None and wanted.start_len >= 0 else 9
        assert len(found) == 9 - start
        for position, of_token in enumerate(found, start=start):
            expected_V = naive_logprobs(logits_of[i][position].numpy())
            check(of_token, expected_V, req.ids[position + 1], wanted)


def test_a_request_that_has_output_already_brings_no_prompt_logprobs() -> None:
    world = ExtendRig("prompt")
    world.reqs[0].ids.append(3)
    world.reqs[0].num_sampled = 1
    assert world.extend(11).sampling.input_logprobs is None


def test_the_matchable_part_of_a_prompt_ends_where_logprobs_begin() -> None:
    lengths = {name: len(make_req(name, 0).matchable_ids) for name in WANTED}
    assert lengths == {
        **dict.fromkeys(WANTED, 10),
        "prompt": 1,
        "prompt_from_3": 4,
        "prompt_from_last": 10,
    }
    resumed = make_req("prompt", 0)
    resumed.ids.append(3)
    assert len(resumed.matchable_ids) == 11
