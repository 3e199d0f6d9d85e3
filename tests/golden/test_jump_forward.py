"""Jump-forward with the built-in model: 1P1D == one node == a plain loop over transformers that jumps as well."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from shared.grammar.xgrammar_backend import XGrammarBackend
from shared.model.config import load_model_config
from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import Finish
from shared.protocol.sampling_params import Grammar, SamplingParams
from tests.cluster import Cluster
from tests.golden.references import Zoo
from tests.golden.serving import GREEDY, Client, node_config, split, unsplit
from tests.golden.test_mixed_chunk import watch
from tests.modelzoo import reference_logits
from tests.patience import PATIENCE_S
from tests.unit.engine.naive_sampler import naive_penalize, naive_sample

MODEL = "builtin"
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99},
        "preferred_delivery_address": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "estimated_time_of_arrival": {"enum": ["tomorrow morning", "tomorrow evening"]},
    },
    "required": ["customer_identification_number", "preferred_delivery_address", "estimated_time_of_arrival"],
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=160, temperature=0.0, grammar=GRAMMAR),
    "seeded": SamplingParams(max_new_tokens=160, temperature=1.0, seed=17, grammar=GRAMMAR),
    "penalized": SamplingParams(
        max_new_tokens=160,
        temperature=1.0,
        seed=8,
        frequency_penalty=0.6,
        presence_penalty=0.4,
        repetition_penalty=1.2,
        grammar=GRAMMAR,
    ),
    "cut-short": SamplingParams(max_new_tokens=7, temperature=0.0, grammar=GRAMMAR),
}
PROMPT = 5

named = pytest.mark.parametrize("name", PARAMS)
topologies = pytest.mark.parametrize("topology", [split, unsplit], ids=["1P1D", "0P1D"])
overlaps = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])


@pytest.fixture(scope="module")
def entries(zoo: Zoo) -> dict[str, list[list[int]]]:
    folder, ids = zoo.folder(MODEL), zoo.prompts(MODEL)[PROMPT]
    return {name: plain_loop(folder, ids, params) for name, params in PARAMS.items()}


def plain_loop(folder: Path, input_ids: list[int], params: SamplingParams) -> list[list[int]]:
    """Each sampled token with those jumped over after it; the matcher is made anew for every token."""
    assert params.grammar is not None
    model = load_model_config(folder)
    compiled = XGrammarBackend.load(folder, model.vocab_size, model.eos_token_ids).compile(params.grammar)
    entries: list[list[int]] = []
    while True:
        output_ids = [token for entry in entries for token in entry]
        matcher = compiled.new_matcher()
        assert all(map(matcher.accept, output_ids))
        if matcher.is_terminated or len(output_ids) == params.max_new_tokens:
            return entries
        mask = np.zeros((1, -(-model.vocab_size // 32)), dtype=np.int32)
        matcher.fill_mask(mask, 0)
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: model.vocab_size]
        logits = reference_logits(folder, [*input_ids, *output_ids])[-1].numpy()
        logits = naive_penalize(logits, params, input_ids, output_ids)
        token = naive_sample(logits, params, len(output_ids), set(np.nonzero(bits == 0)[0].tolist()))
        assert matcher.accept(token)
        forced = [] if matcher.is_terminated else matcher.forced_tokens()[:-1]
        forced = forced[: params.max_new_tokens - len(output_ids) - 1]
        entries.append([token, *(forced if len(forced) >= 3 else [])])


def flat(entries: list[list[int]]) -> list[int]:
    return [token for entry in entries for token in entry]


@pytest.fixture
def client_of(zoo: Zoo) -> Iterator[object]:
    clusters: list[Cluster] = []

    def make(topology: object, *, enable_jump_forward: bool = True, **options: object) -> Client:
        config = node_config(zoo.folder(MODEL), enable_jump_forward=enable_jump_forward, **options)  # type: ignore[arg-type]
        clusters.append(topology(config))  # type: ignore[operator]
        for node in clusters[-1].nodes.values():  # the clock of a cluster is virtual, the compiler's is not
            node.engine.grammars.compile(GRAMMAR).result(PATIENCE_S)
        return Client(clusters[-1])

    yield make
    for cluster in clusters:
        cluster.close()


def test_the_expected_outputs_are_what_the_schema_says(zoo: Zoo, entries: dict[str, list[list[int]]]) -> None:
    tokenizer = Tokenizer.from_file(str(zoo.folder(MODEL) / "tokenizer.json"))
    for name in ("greedy", "seeded", "penalized"):
        found = json.loads(tokenizer.decode(flat(entries[name])))
        assert list(found) == SCHEMA["required"]
        assert 0 <= found["customer_identification_number"] <= 99
        assert re.fullmatch("[a-z]{1,6}", found["preferred_delivery_address"])
        assert found["estimated_time_of_arrival"] in ("tomorrow morning", "tomorrow evening")
        assert sum(len(entry) > 1 for entry in entries[name]) >= 3
    assert len(flat(entries["cut-short"])) == 7 and len(entries["cut-short"][-1]) > 1


@named
@topologies
@overlaps
def test_alone(
    zoo: Zoo,
    entries: dict[str, list[list[int]]],
    client_of: object,
    name: str,
    topology: object,
    overlap: bool,
) -> None:
    client: Client = client_of(topology, overlap=overlap)  # type: ignore[operator]
    key = client.submit(zoo.prompts(MODEL)[PROMPT], PARAMS[name])
    client.cluster.run_all()
    assert client.cluster.tokens(key) == flat(entries[name])
    finish = client.cluster.router.answers[key].finish
    assert finish == (Finish("length") if name == "cut-short" else Finish("stop", entries[name][-1][-1]))
    client.cluster.assert_idle()


@pytest.mark.parametrize(
    ("topology", "overlap", "options"),
    [
        (split, True, {}),
        (split, False, {"retract_every": 3, "enable_mixed_chunk": True}),
        (split, True, {"disable_radix_cache": True, "chunk": 6}),
        (unsplit, False, {}),
        (unsplit, True, {"retract_every": 3, "enable_mixed_chunk": True}),
    ],
    ids=["1P1D", "1P1D-serial-mixed", "1P1D-uncached", "0P1D-serial", "0P1D-mixed"],
)
def test_all_at_once_beside_requests_without_a_grammar(
    zoo: Zoo,
    entries: dict[str, list[list[int]]],
    client_of: object,
    topology: object,
    overlap: bool,
    options: dict[str, object],
) -> None:
    client: Client = client_of(topology, overlap=overlap, **options)  # type: ignore[operator]
    cluster = client.cluster
    plain = [6, 7]
    plain_keys = [client.submit(zoo.prompts(MODEL)[i], GREEDY) for i in plain]
    keys = {name: client.submit(zoo.prompts(MODEL)[PROMPT], params) for name, params in PARAMS.items()}
    cluster.run_all()
    assert {name: cluster.tokens(key) for name, key in keys.items()} == {
        name: flat(wanted) for name, wanted in entries.items()
    }
    assert [cluster.tokens(key) for key in plain_keys] == [zoo.greedy(MODEL, i) for i in plain]
    assert bool(cluster.nodes["d0"].scheduler.batcher.num_retractions) == ("retract_every" in options)
    cluster.assert_idle()


@topologies
def test_resumed_behind_any_entry(
    zoo: Zoo, entries: dict[str, list[list[int]]], client_of: object, topology: object
) -> None:
    client: Client = client_of(topology)  # type: ignore[operator]
    for name in ("seeded", "penalized"):
        behind_jumps = [n for n, entry in enumerate(entries[name], 1) if len(entry) > 1]
        seen = [flat(entries[name][:n]) for n in (1, *behind_jumps, behind_jumps[0] - 1, behind_jumps[0] + 1)]
        ids = zoo.prompts(MODEL)[PROMPT]
        keys = [client.submit(ids, PARAMS[name], output_ids=output_ids) for output_ids in seen]
        client.cluster.run_all()
        assert [client.cluster.tokens(key) for key in keys] == [flat(entries[name])] * len(seen)
    client.cluster.assert_idle()


@overlaps
def test_fewer_forwards(
    zoo: Zoo, entries: dict[str, list[list[int]]], client_of: object, overlap: bool
) -> None:
    """As many as tokens are sampled; with overlap a jump, and a stop, have one more in flight, in vain."""
    tokenizer = Tokenizer.from_file(str(zoo.folder(MODEL) / "tokenizer.json"))
    num_forwards = {}
    for jump in (False, True):
        client: Client = client_of(unsplit, overlap=overlap, chunk=512, enable_jump_forward=jump)  # type: ignore[operator]
        launched = watch(client.cluster)
        key = client.submit(zoo.prompts(MODEL)[PROMPT], PARAMS["seeded"])
        client.cluster.run_all()
        num_forwards[jump] = len(launched)
        found = json.loads(tokenizer.decode(client.cluster.tokens(key)))
        assert list(found) == SCHEMA["required"]
    wanted = entries["seeded"]
    num_jumps = sum(len(entry) > 1 for entry in wanted)
    assert num_forwards[True] == len(wanted) + overlap * (num_jumps + 1)
    assert num_forwards[True] < 0.75 * num_forwards[False]


def test_who_wants_logprobs_has_every_token_sampled(zoo: Zoo, client_of: object) -> None:
    outputs = []
    for jump, logprobs in ((False, None), (True, LogprobParams())):
        client: Client = client_of(split, enable_jump_forward=jump)  # type: ignore[operator]
        params = msgspec.structs.replace(PARAMS["seeded"], max_new_tokens=30, logprobs=logprobs)
        key = client.submit(zoo.prompts(MODEL)[PROMPT], params)
        client.cluster.run_all()
        outputs.append(client.cluster.tokens(key))
        logprobs_by_position = client.cluster.router.answers[key].logprobs
        assert len(logprobs_by_position) == (len(outputs[-1]) if logprobs else 0)
    assert outputs[0] == outputs[1]
