"""Tokens of 1 prefill + 1 decode on the GPU: those of transformers in float32, those of one node in bf16.

`make test-gpu` names this file to pytest, which finds no tests in it by itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.config import NodeConfig
from shared.protocol.logprobs import LogprobParams
from shared.protocol.sampling_params import SamplingParams, TokenBias
from tests.device import device
from tests.golden.pairwise import pairwise
from tests.golden.references import Zoo, reference_tokens
from tests.golden.serving import Client, node_config, split, unsplit
from tests.golden.test_native import NUM_NEW, assert_goes_on, streamed
from tests.modelzoo import random_prompt, reference_greedy, reference_logits

BACKENDS = ("torch", "triton") if device().type == "cuda" else ("torch",)
EXACT_BACKEND = "triton" if device().type == "cuda" else "native"
EXACT_MODELS = ("qwen3", "llama")
NUM_PROMPTS = 12
PARAMS = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)


def config_of(folder: Path, backend: str, dtype: str = "float32", **options: object) -> NodeConfig:
    config = node_config(folder, **options)  # type: ignore[arg-type]
    model = replace(
        config.model,
        device=device().type,
        attention_backend=backend,
        dtype=dtype,
        cuda_graph_max_bs=NUM_PROMPTS,
    )
    # With a share of the GPU that it is given, a node need not wait for others to start.
    return replace(config, model=model, cache=replace(config.cache, mem_fraction_static=0.2))


def exact_config(folder: Path, **options: object) -> NodeConfig:
    config = config_of(folder, EXACT_BACKEND, "bfloat16", **options)
    return replace(config, model=replace(config.model, exact=device().type == "cuda"))


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """The Triton kernels take heads of at least 64 elements."""
    return Zoo(tmp_path_factory.mktemp("zoo"), {"head_dim": 64})


FACTORS: dict[str, tuple[object, ...]] = {
    "model": ("llama", "qwen3", "gptoss"),  # the last has windows, sinks and experts
    "backend": BACKENDS,
    "overlap": (True, False),
    "retract_every": (0, 3),
}


@pytest.mark.parametrize(tuple(FACTORS), pairwise(FACTORS))
def test_split_equals_transformers(
    zoo: Zoo, model: str, backend: str, overlap: bool, retract_every: int
) -> None:
    folder = zoo.folder(model)
    prompts = [random_prompt(40 + 7 * i, seed=i) for i in range(8)]
    with split(config_of(folder, backend, overlap=overlap, retract_every=retract_every)) as cluster:
        got = Client(cluster).tokens(prompts)
    assert got == [reference_greedy(folder, ids, 32) for ids in prompts]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("retract_every", [0, 3])
def test_penalties_and_logprobs(zoo: Zoo, backend: str, retract_every: int) -> None:
    """Beside requests that ask for nothing."""
    llama, ids = zoo.folder("llama"), random_prompt(50, seed=1)
    params = SamplingParams(
        max_new_tokens=16,
        temperature=0.0,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=(TokenBias(77, 6.0),),
        ignore_eos=True,
        logprobs=LogprobParams(start_len=10, top_num=4, token_ids=(3, 9)),
    )
    with split(config_of(llama, backend, retract_every=retract_every)) as cluster:
        client = Client(cluster)
        client.submit(random_prompt(60, seed=2))
        key = client.submit(ids, params)
        cluster.run_all()
        answer = cluster.router.answers[key]
    tokens = reference_tokens(llama, ids, params)
    assert answer.token_ids == tokens
    expected = torch.log_softmax(reference_logits(llama, [*ids, *tokens]), dim=-1)
    found = [*(answer.input_logprobs or ()), *(answer.logprobs[i] for i in range(16))]
    all_ids = [*ids, *tokens]
    assert len(found) == len(all_ids) - 11
    for position, of_token in enumerate(found, start=10):
        of_all_V = expected[position]
        assert of_token.logprob == pytest.approx(of_all_V[all_ids[position + 1]].item(), abs=1e-3)
        assert [x for x, _ in of_token.top] == pytest.approx(of_all_V.topk(4).values.tolist(), abs=1e-3)
        assert of_token.of_token_ids == pytest.approx([of_all_V[3].item(), of_all_V[9].item()], abs=1e-3)


@pytest.fixture(scope="module")
def alone(zoo: Zoo) -> dict[str, list[list[int]]]:
    """In bf16, the tokens of each model's prompts, one at a time on one node."""
    found: dict[str, list[list[int]]] = {}
    for model in EXACT_MODELS:
        with unsplit(exact_config(zoo.folder(model), chunk=512, overlap=False)) as cluster:
            client = Client(cluster)
            found[model] = [client.tokens([ids], PARAMS)[0] for ids in zoo.prompts(model)[:NUM_PROMPTS]]
    return found


BF16_FACTORS: dict[str, tuple[object, ...]] = {
    "model": EXACT_MODELS,
    "chunk": (23, 512),
    "mixed": (False, True),
    "retract_every": (0, 3),
}


@pytest.mark.parametrize(tuple(BF16_FACTORS), pairwise(BF16_FACTORS))
def test_split_equals_one_node_in_bf16(
    zoo: Zoo, alone: dict[str, list[list[int]]], model: str, chunk: int, mixed: bool, retract_every: int
) -> None:
    config = exact_config(
        zoo.folder(model),
        chunk=chunk,
        enable_mixed_chunk=mixed,
        retract_every=retract_every,
        retract_policy="recompute",
    )
    with split(config) as cluster:
        assert Client(cluster).tokens(zoo.prompts(model)[:NUM_PROMPTS], PARAMS) == alone[model]


@pytest.mark.parametrize("model", EXACT_MODELS)
def test_a_stream_goes_on_to_the_bit_elsewhere(zoo: Zoo, model: str) -> None:
    """A node that prefills prompt and output again leaves the KV, tokens and logprobs of an undisturbed stream."""
    folder, ids = zoo.folder(model), zoo.prompts(model)[NUM_PROMPTS - 1]
    with unsplit(exact_config(folder, chunk=512)) as cluster:
        whole = streamed(cluster, ids, [])
    for num_known, chunk in ((1, 512), (17, 23), (NUM_NEW - 2, 7)):
        with split(exact_config(folder, chunk=chunk)) as cluster:
            again = streamed(cluster, ids, whole.tokens[:num_known])
        assert_goes_on(again, whole, num_known, len(ids))
