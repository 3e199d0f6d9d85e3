"""Outputs under a grammar: 1P1D == one node == a plain transformers loop under the same masks, in float32.

Greedy and seeded at temperature 1, with overlap and without, after forced retraction, over prefix hits, beside
requests without a grammar, and resumed from any position.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from shared.grammar.xgrammar_backend import XGrammarBackend
from shared.protocol.messages import Finish
from shared.protocol.sampling_params import Grammar, SamplingParams
from tests.cluster import Cluster
from tests.golden.references import EOS_IDS, Zoo
from tests.golden.serving import GREEDY, Client, node_config, split, unsplit
from tests.modelzoo import reference_logits
from tests.patience import PATIENCE_S
from tests.unit.engine.naive_sampler import naive_sample

MODEL = "llama"
VOCAB_SIZE = 512
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["page", "node", "token"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
    },
    "required": ["kind", "size", "name"],
}
PATTERN = "(ab|cd){1,4}-[0-9]{3}"
SCHEMA_GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
REGEX = Grammar("regex", PATTERN)
EBNF = Grammar("ebnf", 'root ::= item ("," item)*\nitem ::= [a-f] | "(" root ")"')
PARAMS = {
    "schema-greedy": SamplingParams(max_new_tokens=200, temperature=0.0, grammar=SCHEMA_GRAMMAR),
    "schema-seeded": SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, grammar=SCHEMA_GRAMMAR),
    "schema-ignore-eos": SamplingParams(
        max_new_tokens=200, temperature=1.0, seed=4, ignore_eos=True, grammar=SCHEMA_GRAMMAR
    ),
    "regex-greedy": SamplingParams(max_new_tokens=40, temperature=0.0, grammar=REGEX),
    "regex-top_p": SamplingParams(max_new_tokens=40, temperature=0.9, top_p=0.8, seed=5, grammar=REGEX),
    "regex-min_new": SamplingParams(
        max_new_tokens=40, min_new_tokens=30, temperature=1.0, seed=9, grammar=REGEX
    ),
    "ebnf-cut-short": SamplingParams(max_new_tokens=4, temperature=1.0, seed=7, grammar=EBNF),
}
named = pytest.mark.parametrize("name", PARAMS)
topologies = pytest.mark.parametrize("topology", [split, unsplit], ids=["1P1D", "0P1D"])
PROMPT = 5


@pytest.fixture(scope="module")
def expected(zoo: Zoo) -> dict[str, list[int]]:
    """A plain loop: logits by transformers, masks by a fresh matcher for each token, a numpy sampler."""
    folder, ids = zoo.folder(MODEL), zoo.prompts(MODEL)[PROMPT]
    backend = XGrammarBackend.load(folder, VOCAB_SIZE, EOS_IDS)
    return {name: plain_loop(folder, ids, params, backend) for name, params in PARAMS.items()}


def plain_loop(
    folder: Path, input_ids: list[int], params: SamplingParams, backend: XGrammarBackend
) -> list[int]:
    assert params.grammar is not None
    compiled = backend.compile(params.grammar)
    output_ids: list[int] = []
    while len(output_ids) < params.max_new_tokens:
        matcher = compiled.new_matcher()
        assert all(matcher.accept(token) for token in output_ids)
        mask = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
        matcher.fill_mask(mask, 0)
        allowed = {i for i in range(VOCAB_SIZE) if mask[0].view(np.uint32)[i // 32] >> (i % 32) & 1}
        early = set(EOS_IDS) if len(output_ids) < params.min_new_tokens and not params.ignore_eos else set()
        if allowed <= early:
            early = set()
        masked = (set(range(VOCAB_SIZE)) - allowed) | early
        logits = reference_logits(folder, [*input_ids, *output_ids])[-1].numpy()
        if allowed <= set(EOS_IDS) and len(output_ids) < params.min_new_tokens:
            logits = np.zeros_like(
                logits
            )  # min_new_tokens excludes what the grammar wants: any of it will do
        output_ids.append(naive_sample(logits, params, len(output_ids), masked))
        if output_ids[-1] in EOS_IDS:
            break
    return output_ids


@pytest.fixture
def client_of(zoo: Zoo) -> Iterator[object]:
    clusters: list[Cluster] = []

    def make(topology: object, **options: object) -> Client:
        cluster: Cluster = topology(node_config(zoo.folder(MODEL), **options))  # type: ignore[operator,arg-type]
        clusters.append(cluster)
        for node in cluster.nodes.values():  # the clock of a cluster is virtual, the compiler's is not
            for grammar in (SCHEMA_GRAMMAR, REGEX, EBNF):
                node.engine.grammars.compile(grammar).result(PATIENCE_S)
        return Client(cluster)

    yield make
    for cluster in clusters:
        cluster.close()


def test_the_expected_outputs_are_what_the_grammars_say(zoo: Zoo, expected: dict[str, list[int]]) -> None:
    tokenizer = Tokenizer.from_file(str(zoo.folder(MODEL) / "tokenizer.json"))
    texts = {name: tokenizer.decode(tokens) for name, tokens in expected.items()}
    for name, text in texts.items():
        if name.startswith("schema"):
            found = json.loads(text)
            assert list(found) == SCHEMA["required"]
            assert found["kind"] in ("page", "node", "token")
            assert 0 <= found["size"] <= 99
            assert re.fullmatch("[a-z]{1,6}", found["name"])
        if name.startswith("regex"):
            assert re.fullmatch(PATTERN, text)
    assert len(expected["ebnf-cut-short"]) == 4
    assert len(set(texts.values())) == len(texts)
    assert len(expected["regex-min_new"]) < 30  # the grammar ends before that


@named
@topologies
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_alone(
    zoo: Zoo, expected: dict[str, list[int]], client_of: object, name: str, topology: object, overlap: bool
) -> None:
    client: Client = client_of(topology, overlap=overlap)  # type: ignore[operator]
    key = client.submit(zoo.prompts(MODEL)[PROMPT], PARAMS[name])
    client.cluster.run_all()
    assert client.cluster.tokens(key) == expected[name]
    ended_by_grammar = expected[name][-1] in EOS_IDS
    finish = client.cluster.router.answers[key].finish
    assert finish == (Finish("stop", expected[name][-1]) if ended_by_grammar else Finish("length"))
    client.cluster.assert_idle()


@topologies
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize(("retract_every", "way"), [(0, "recompute"), (3, "recompute"), (3, "host")])
def test_all_at_once_beside_requests_without_a_grammar(
    zoo: Zoo,
    expected: dict[str, list[int]],
    client_of: object,
    topology: object,
    overlap: bool,
    retract_every: int,
    way: str,
) -> None:
    client: Client = client_of(  # type: ignore[operator]
        topology,
        overlap=overlap,
        retract_every=retract_every,
        retract_policy=way,
        host_kv_tokens=8192 if way == "host" else 0,
    )
    cluster = client.cluster
    plain = [6, 7, 8]
    plain_keys = [client.submit(zoo.prompts(MODEL)[i], GREEDY) for i in plain]
    client.leave_prefix("d0", zoo.prompts(MODEL)[PROMPT][:53])
    keys = {name: client.submit(zoo.prompts(MODEL)[PROMPT], params) for name, params in PARAMS.items()}
    cluster.run_all()
    assert {name: cluster.tokens(key) for name, key in keys.items()} == expected
    assert [cluster.tokens(key) for key in plain_keys] == [zoo.greedy(MODEL, i) for i in plain]
    count = cluster.nodes["d0"].scheduler.batcher.retraction.count
    assert bool(count.num_recompute) == (retract_every > 0 and way == "recompute")
    assert bool(count.num_host) == (way == "host")
    cluster.assert_idle()


@named
@topologies
def test_resumed_at_any_position(
    zoo: Zoo, expected: dict[str, list[int]], client_of: object, name: str, topology: object
) -> None:
    client: Client = client_of(topology)  # type: ignore[operator]
    tokens = expected[name]
    seen = [1, len(tokens) // 2, len(tokens) - 1]
    keys = [client.submit(zoo.prompts(MODEL)[PROMPT], PARAMS[name], output_ids=tokens[:n]) for n in seen]
    client.cluster.run_all()
    assert [client.cluster.tokens(key) for key in keys] == [tokens] * len(seen)
    client.cluster.assert_idle()
