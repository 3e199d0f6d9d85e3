"""Logprobs of 1 prefill + 1 decode == of one node == of transformers, of prompt and output, each told once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from shared.protocol.logprobs import LogprobParams, TokenLogprobs
from shared.protocol.messages import ReqKey
from shared.protocol.sampling_params import SamplingParams, TokenBias
from tests.cluster import Answer
from tests.golden.references import Zoo, reference_tokens
from tests.golden.serving import Client, Topology, node_config, overlaps, split, topologies, unsplit
from tests.modelzoo import reference_logits

TOLERANCE = 2e-4
"""Of a float32 logprob, computed in blocks of another shape. Logits reach 20, and one bit of those is 2e-6."""
PROMPT = 4
NUM_NEW = 16
TOP, IDS = 5, (3, 400, 77)


def wanted(start_len: int = -1) -> LogprobParams:
    return LogprobParams(start_len=start_len, top_num=TOP, token_ids=IDS)


def greedy(start_len: int = -1, **params: object) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=NUM_NEW,
        temperature=0.0,
        ignore_eos=True,
        logprobs=wanted(start_len),
        **params,  # type: ignore[arg-type]
    )


def of_transformers(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Logprobs [T, V]. Row i has those of the token at position i + 1."""
    return torch.log_softmax(reference_logits(folder, ids).double(), dim=-1)


def check_token(found: TokenLogprobs, expected_V: torch.Tensor, token_id: int) -> None:
    assert found.logprob == pytest.approx(expected_V[token_id].item(), abs=TOLERANCE)
    values = [x for x, _ in found.top]
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(expected_V.topk(TOP).values.tolist(), abs=TOLERANCE)
    assert values == pytest.approx([expected_V[i].item() for _, i in found.top], abs=TOLERANCE)
    assert len({i for _, i in found.top}) == TOP
    assert found.of_token_ids == pytest.approx([expected_V[i].item() for i in IDS], abs=TOLERANCE)


def check(
    folder: Path, ids: Sequence[int], tokens: Sequence[int], answer: Answer, params: SamplingParams
) -> None:
    """Everything that was asked for is there, and right."""
    assert answer.token_ids == list(tokens)
    expected = of_transformers(folder, [*ids, *tokens])
    assert params.logprobs is not None
    start = params.logprobs.start_len
    assert sorted(answer.logprobs) == list(range(len(tokens)))
    for position, token_id in enumerate(tokens):
        check_token(answer.logprobs[position], expected[len(ids) + position - 1], token_id)
    of_prompt = answer.input_logprobs or []
    assert len(of_prompt) == (len(ids) - 1 - start if start >= 0 else 0)
    for position, found in enumerate(of_prompt, start=start):
        check_token(found, expected[position], ids[position + 1])


def submit_beside_others(zoo: Zoo, client: Client, params: SamplingParams) -> ReqKey:
    """Among requests that ask for nothing, less, and more."""
    plain = msgspec.structs.replace(params, logprobs=None)
    others = [
        plain,
        msgspec.structs.replace(params, logprobs=LogprobParams()),
        msgspec.structs.replace(params, logprobs=LogprobParams(start_len=5, top_num=20)),
    ]
    for i, ids in enumerate(zoo.prompts("llama")[10:13]):
        client.submit(ids, others[i])
    return client.submit(zoo.prompts("llama")[PROMPT], params)


@pytest.fixture(scope="module")
def tokens(zoo: Zoo) -> list[int]:
    return zoo.greedy("llama", PROMPT)[:NUM_NEW]


@topologies
@pytest.mark.parametrize(("chunk", "overlap"), [(20, False), (23, True), (512, True)])
def test_prompt_and_output(
    zoo: Zoo, llama: Path, tokens: list[int], topology: Topology, chunk: int, overlap: bool
) -> None:
    """Of one prompt from several positions on, all at once."""
    ids = zoo.prompts("llama")[PROMPT]
    assert len(ids) == 140
    some = [greedy(start_len) for start_len in (-1, 0, 33, 138)]
    last = greedy(139)
    config = node_config(llama, chunk=chunk, overlap=overlap, disable_radix_cache=True)
    with topology(config) as cluster:
        client = Client(cluster)
        keys = [client.submit(ids, params) for params in some]
        keys.append(submit_beside_others(zoo, client, last))
        cluster.run_all()
        for key, params in zip(keys, [*some, last], strict=True):
            check(llama, ids, tokens, cluster.router.answers[key], params)
        cluster.assert_idle()


@topologies
@pytest.mark.parametrize(("start_len", "page_size"), [(0, 16), (70, 1), (70, 16), (139, 1)])
def test_a_cached_prompt_is_computed_as_far_as_asked(
    zoo: Zoo, llama: Path, tokens: list[int], topology: Topology, start_len: int, page_size: int
) -> None:
    """Both nodes hold the whole prompt; the one that prefills may use it only up to `logprob_start_len`."""
    ids = zoo.prompts("llama")[PROMPT]
    with topology(node_config(llama, page_size=page_size)) as cluster:
        client = Client(cluster)
        client.tokens([ids], greedy())
        if "p0" in cluster.nodes:
            client.leave_prefix("d0", ids)
        key = client.submit(ids, greedy(start_len))
        cluster.run_all()
        answer = cluster.router.answers[key]
        check(llama, ids, tokens, answer, greedy(start_len))
        assert answer.reports[0].cached_tokens == start_len // page_size * page_size
        cluster.assert_idle()


@topologies
@overlaps
@pytest.mark.parametrize("host_kv_tokens", [0, 4096], ids=["recompute", "host"])
def test_retraction_tells_no_position_twice(
    zoo: Zoo, llama: Path, tokens: list[int], topology: Topology, overlap: bool, host_kv_tokens: int
) -> None:
    """After a retraction, tokens and logprobs that were sent before are not sent again."""
    way = "host" if host_kv_tokens else "recompute"
    config = node_config(
        llama,
        overlap=overlap,
        retract_every=3,
        host_kv_tokens=host_kv_tokens,
        retract_policy=way,  # type: ignore[arg-type]
    )
    with topology(config) as cluster:
        key = submit_beside_others(zoo, Client(cluster), greedy(0))
        cluster.run_all()
        answer = cluster.router.answers[key]
        check(llama, zoo.prompts("llama")[PROMPT], tokens, answer, greedy(0))
        count = cluster.nodes["d0"].scheduler.batcher.retraction.count
        assert getattr(count, f"num_{way}") > 3
        positions = Counter(answer.positions)
        assert Counter(answer.logprob_positions) == positions + Counter({-1: positions[0]})
        # The decode node repeats the first token of the prefill node.
        assert positions.pop(0) == (2 if "p0" in cluster.nodes else 1)
        assert set(positions.values()) == {1}
        cluster.assert_idle()


@topologies
def test_resumed_in_the_middle(zoo: Zoo, llama: Path, tokens: list[int], topology: Topology) -> None:
    """A new attempt sends the logprobs of the tokens that it samples. The first attempt sent the others."""
    ids = zoo.prompts("llama")[PROMPT]
    with topology(node_config(llama)) as cluster:
        key = Client(cluster).submit(ids, greedy(0), output_ids=tokens[:6])
        cluster.run_all()
        answer = cluster.router.answers[key]
        assert answer.token_ids == tokens
        assert sorted(answer.logprobs) == list(range(6, NUM_NEW))
        assert answer.input_logprobs is None
        expected = of_transformers(llama, [*ids, *tokens])
        for position, found in answer.logprobs.items():
            check_token(found, expected[len(ids) + position - 1], tokens[position])


@pytest.mark.parametrize("max_new_tokens", [0, 1])
@pytest.mark.parametrize("node", ["p0", "d0"])
def test_score_only(zoo: Zoo, llama: Path, tokens: list[int], max_new_tokens: int, node: str) -> None:
    ids = zoo.prompts("llama")[PROMPT]
    params = msgspec.structs.replace(greedy(0), max_new_tokens=max_new_tokens)
    with split(node_config(llama)) as cluster:
        key = Client(cluster).submit_to(node, ids, params)
        cluster.run_all()
        check(llama, ids, tokens[:max_new_tokens], cluster.router.answers[key], params)
        cluster.assert_idle()


def test_beside_a_decode_step(zoo: Zoo, llama: Path, tokens: list[int]) -> None:
    """Chunks of a prompt with logprobs share their forwards with steps of a stream with logprobs."""
    other = 10
    with unsplit(node_config(llama, chunk=20, enable_mixed_chunk=True)) as cluster:
        client = Client(cluster)
        stream = client.submit(zoo.prompts("llama")[other], greedy())
        cluster.run(lambda: len(cluster.router.answers[stream].token_ids) > 3)
        scored = client.submit(zoo.prompts("llama")[PROMPT], greedy(33))
        cluster.run(lambda: bool(cluster.router.answers[scored].token_ids))
        assert 8 < len(cluster.router.answers[stream].token_ids) < NUM_NEW
        cluster.run_all()
        expected = zoo.greedy("llama", other)[:NUM_NEW]
        answers = cluster.router.answers
        check(llama, zoo.prompts("llama")[other], expected, answers[stream], greedy())
        check(llama, zoo.prompts("llama")[PROMPT], tokens, answers[scored], greedy(33))
        cluster.assert_idle()


@topologies
def test_they_are_the_models_own_whatever_is_sampled(zoo: Zoo, llama: Path, topology: Topology) -> None:
    """Penalties, bias, temperature and filters change what is drawn, not what the model thought of it."""
    ids = zoo.prompts("llama")[PROMPT]
    params = SamplingParams(
        max_new_tokens=NUM_NEW,
        temperature=1.3,
        top_k=30,
        seed=9,
        frequency_penalty=1.0,
        repetition_penalty=1.2,
        logit_bias=(TokenBias(77, 12.0),),
        ignore_eos=True,
        logprobs=wanted(100),
    )
    tokens = reference_tokens(llama, ids, params)
    with topology(node_config(llama)) as cluster:
        key = submit_beside_others(zoo, Client(cluster), params)
        cluster.run_all()
        check(llama, ids, tokens, cluster.router.answers[key], params)
