"""Outputs under a grammar, with jump-forward and without: 1P1D == one node == a plain loop under the same masks.

Greedy and seeded, with overlap and without, after forced retraction, over prefix hits, beside requests without a
grammar, and resumed. With jump-forward the plain loop over transformers jumps as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tokenizers import Tokenizer

from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import Finish
from shared.protocol.sampling_params import Grammar, SamplingParams
from tests.cluster import Cluster
from tests.golden.references import Zoo, reference_entries
from tests.golden.serving import (
    GREEDY,
    Client,
    Topology,
    node_config,
    overlaps,
    split,
    topologies,
    unsplit,
    watch,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.xdist_group("grammars")
"""One process has the references that all tests look at."""


def schema(**properties: object) -> Grammar:
    wanted = {"type": "object", "properties": properties, "required": list(properties)}
    return Grammar("json_schema", json.dumps(wanted))


PATTERN = "(ab|cd){1,4}-[0-9]{3}"
SCHEMA = schema(
    kind={"enum": ["page", "node", "token"]},
    size={"type": "integer", "minimum": 0, "maximum": 99},
    name={"type": "string", "pattern": "^[a-z]{1,6}$"},
)
REGEX = Grammar("regex", PATTERN)
EBNF = Grammar("ebnf", 'root ::= item ("," item)*\nitem ::= [a-f] | "(" root ")"')
LONG_NAMES = schema(
    customer_identification_number={"type": "integer", "minimum": 0, "maximum": 99},
    preferred_delivery_address={"type": "string", "pattern": "^[a-z]{1,6}$"},
    estimated_time_of_arrival={"enum": ["tomorrow morning", "tomorrow evening"]},
)
MODELS = {False: "llama", True: "builtin"}
"""Without jump-forward and with it: the built-in model's tokenizer has words to jump over."""
PARAMS = {
    False: {
        name: SamplingParams(**params)  # type: ignore[arg-type]
        for name, params in {
            "greedy": {"max_new_tokens": 200, "temperature": 0.0, "grammar": SCHEMA},
            "seeded": {"max_new_tokens": 200, "seed": 3, "grammar": SCHEMA},
            "ignore-eos": {"max_new_tokens": 200, "seed": 4, "ignore_eos": True, "grammar": SCHEMA},
            "regex-greedy": {"max_new_tokens": 40, "temperature": 0.0, "grammar": REGEX},
            "regex-top_p": {
                "max_new_tokens": 40,
                "temperature": 0.9,
                "top_p": 0.8,
                "seed": 5,
                "grammar": REGEX,
            },
            "regex-min_new": {"max_new_tokens": 40, "min_new_tokens": 30, "seed": 9, "grammar": REGEX},
            "cut-short": {"max_new_tokens": 4, "seed": 7, "grammar": EBNF},
        }.items()
    },
    True: {
        name: SamplingParams(grammar=LONG_NAMES, **params)  # type: ignore[arg-type]
        for name, params in {
            "greedy": {"max_new_tokens": 160, "temperature": 0.0},
            "seeded": {"max_new_tokens": 160, "seed": 17},
            "penalized": {
                "max_new_tokens": 160,
                "seed": 8,
                "frequency_penalty": 0.6,
                "presence_penalty": 0.4,
                "repetition_penalty": 1.2,
            },
            "cut-short": {"max_new_tokens": 7, "temperature": 0.0},
        }.items()
    },
}
PROMPT = 5
Entries = dict[bool, dict[str, list[list[int]]]]

jumping = pytest.mark.parametrize("jumps", [False, True], ids=["masks", "jumps"])


@pytest.fixture(scope="module")
def entries(zoo: Zoo) -> Entries:
    """What is sampled, by `jumps` and name, each with the tokens that are jumped over behind it."""
    return {
        jumps: {
            name: reference_entries(zoo.folder(model), zoo.prompts(model)[PROMPT], params, jumps=jumps)
            for name, params in PARAMS[jumps].items()
        }
        for jumps, model in MODELS.items()
    }


def flat(entries: list[list[int]]) -> list[int]:
    return [token for entry in entries for token in entry]


@pytest.fixture
def client_of(zoo: Zoo) -> Iterator[Callable[..., Client]]:
    clusters: list[Cluster] = []

    def make(topology: Topology, jumps: bool, **options: object) -> Client:
        config = node_config(zoo.folder(MODELS[jumps]), **{"enable_jump_forward": jumps, **options})  # type: ignore[arg-type]
        clusters.append(topology(config))
        for node in clusters[-1].nodes.values():  # the clock of a cluster is virtual, the compiler's is not
            for grammar in {params.grammar for params in PARAMS[jumps].values()}:
                node.engine.grammars.compile(grammar).result(PATIENCE_S)
        return Client(clusters[-1])

    yield make
    for cluster in clusters:
        cluster.close()


def test_the_expected_outputs_are_what_the_grammars_say(zoo: Zoo, entries: Entries) -> None:
    for jumps, model in MODELS.items():
        tokenizer = Tokenizer.from_file(str(zoo.folder(model) / "tokenizer.json"))
        for name, params in PARAMS[jumps].items():
            text = tokenizer.decode(flat(entries[jumps][name]))
            if name == "cut-short":
                assert len(flat(entries[jumps][name])) == params.max_new_tokens
            elif params.grammar is REGEX:
                assert re.fullmatch(PATTERN, text)
            else:
                assert list(json.loads(text)) == json.loads(params.grammar.text)["required"]
            if jumps:
                assert sum(len(entry) > 1 for entry in entries[jumps][name]) >= (
                    1 if name == "cut-short" else 3
                )
    assert len(flat(entries[False]["regex-min_new"])) < 30  # the grammar ends before that


@jumping
@pytest.mark.parametrize(("topology", "overlap"), [(split, True), (unsplit, False)])
def test_alone(
    zoo: Zoo,
    entries: Entries,
    client_of: Callable[..., Client],
    jumps: bool,
    topology: Topology,
    overlap: bool,
) -> None:
    client = client_of(topology, jumps, overlap=overlap)
    for name, wanted in entries[jumps].items():
        key = client.submit(zoo.prompts(MODELS[jumps])[PROMPT], PARAMS[jumps][name])
        client.cluster.run_all()
        assert client.cluster.tokens(key) == flat(wanted)
        last = wanted[-1][-1]
        finish = client.cluster.router.answers[key].finish
        assert finish == (Finish("length") if name == "cut-short" else Finish("stop", last))
        client.cluster.assert_idle()


OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "serial": {"overlap": False},
    "recompute": {"retract_every": 3},
    "serial-mixed": {"retract_every": 3, "overlap": False, "enable_mixed_chunk": True},
    "host": {"retract_every": 3, "retract_policy": "host", "host_kv_tokens": 8192},
    "uncached": {"disable_radix_cache": True, "chunk": 6},
}


@pytest.mark.parametrize(
    ("jumps", "topology", "name"),
    [
        *((False, split, name) for name in ("plain", "serial-mixed", "host", "uncached")),
        *((False, unsplit, name) for name in ("serial", "recompute", "host", "uncached")),
        *((True, split, name) for name in ("plain", "serial-mixed")),
        (True, unsplit, "recompute"),
    ],
)
def test_all_at_once_beside_requests_without_a_grammar(
    zoo: Zoo,
    entries: Entries,
    client_of: Callable[..., Client],
    jumps: bool,
    topology: Topology,
    name: str,
) -> None:
    options = OPTIONS[name]
    client = client_of(topology, jumps, **options)
    cluster, prompts = client.cluster, zoo.prompts(MODELS[jumps])
    plain = {i: client.submit(prompts[i], GREEDY) for i in (6, 7, 8)}
    if name != "uncached":
        client.leave_prefix("d0", prompts[PROMPT][:53])
    keys = {name: client.submit(prompts[PROMPT], params) for name, params in PARAMS[jumps].items()}
    cluster.run_all()
    assert {name: cluster.tokens(key) for name, key in keys.items()} == {
        name: flat(wanted) for name, wanted in entries[jumps].items()
    }
    assert [cluster.tokens(key) for key in plain.values()] == [zoo.greedy(MODELS[jumps], i) for i in plain]
    count = cluster.nodes["d0"].scheduler.batcher.retraction.count
    assert bool(count.num_host) == (name == "host")
    assert bool(count.num_recompute) == (name in ("recompute", "serial-mixed"))
    cluster.assert_idle()


@jumping
@topologies
def test_resumed_behind_any_entry(
    zoo: Zoo, entries: Entries, client_of: Callable[..., Client], jumps: bool, topology: Topology
) -> None:
    """At jumps, and the entries beside them."""
    client = client_of(topology, jumps)
    for name, wanted in entries[jumps].items():
        behind_jumps = [n for n, entry in enumerate(wanted, 1) if len(entry) > 1]
        middle = behind_jumps[0] if behind_jumps else len(wanted) // 2
        counts = {1, *behind_jumps, middle - 1, middle + 1, len(wanted) - 1}
        seen = [flat(wanted[:n]) for n in sorted(counts) if 0 < n < len(wanted)]
        ids = zoo.prompts(MODELS[jumps])[PROMPT]
        keys = [client.submit(ids, PARAMS[jumps][name], output_ids=output_ids) for output_ids in seen]
        client.cluster.run_all()
        assert [client.cluster.tokens(key) for key in keys] == [flat(wanted)] * len(seen)
    client.cluster.assert_idle()


@overlaps
def test_jumps_save_forwards(
    zoo: Zoo, entries: Entries, client_of: Callable[..., Client], overlap: bool
) -> None:
    """As many as tokens are sampled; with overlap a jump, and a stop, have one more in flight, in vain."""
    num_forwards = {}
    for jump in (False, True):
        client = client_of(unsplit, True, overlap=overlap, chunk=512, enable_jump_forward=jump)
        launched = watch(client.cluster)
        client.submit(zoo.prompts("builtin")[PROMPT], PARAMS[True]["seeded"])
        client.cluster.run_all()
        num_forwards[jump] = len(launched)
    wanted = entries[True]["seeded"]
    num_jumps = sum(len(entry) > 1 for entry in wanted)
    assert num_forwards[True] == len(wanted) + overlap * (num_jumps + 1)
    assert num_forwards[True] < 0.75 * num_forwards[False]


def test_who_wants_logprobs_has_every_token_sampled(zoo: Zoo, client_of: Callable[..., Client]) -> None:
    outputs = []
    for jump, logprobs in ((False, None), (True, LogprobParams())):
        client = client_of(split, True, enable_jump_forward=jump)
        params = msgspec.structs.replace(PARAMS[True]["seeded"], max_new_tokens=30, logprobs=logprobs)
        key = client.submit(zoo.prompts("builtin")[PROMPT], params)
        client.cluster.run_all()
        outputs.append(client.cluster.tokens(key))
        logprobs_by_position = client.cluster.router.answers[key].logprobs
        assert len(logprobs_by_position) == (len(outputs[-1]) if logprobs else 0)
    assert outputs[0] == outputs[1]
