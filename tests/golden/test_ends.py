"""Where a sequence begins and ends: resumed attempts, lengths, EOS and stop ids, on one node and on two."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.protocol.messages import Finish
from shared.protocol.sampling_params import SamplingParams
from tests.cluster import Cluster
from tests.golden.references import Zoo, reference_tokens
from tests.golden.serving import GREEDY, Client, node_config, split, unsplit

TOPOLOGIES = {"1P1D": split, "0P1D": unsplit}
topology = pytest.mark.parametrize("topology", TOPOLOGIES)
overlap = pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])


def start(topology: str, folder: Path, **options: object) -> Cluster:
    return TOPOLOGIES[topology](node_config(folder, **options))  # type: ignore[arg-type]


def params(**changes: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **changes)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("nodes", [("p0",), ("d0",), ("p0", "d0")], ids="-".join)
def test_the_whole_prompt_is_cached(zoo: Zoo, llama: Path, page_size: int, nodes: tuple[str, ...]) -> None:
    """The prefill node computes its last token again; the decode node needs no page at all."""
    ids = zoo.prompts("llama")[1]  # 80 tokens: whole pages
    with start("1P1D", llama, page_size=page_size) as cluster:
        client = Client(cluster)
        for node in nodes:
            client.leave_prefix(node, ids)
        key = client.submit(ids)
        cluster.run_all()
        assert cluster.tokens(key) == zoo.greedy("llama", 1)
        on_prefill, *_, at_finish = cluster.router.answers[key].reports
        assert on_prefill.cached_tokens == (80 - page_size if "p0" in nodes else 0)
        assert at_finish.kv_pages_transferred == (0 if "d0" in nodes else 80 // page_size)
        cluster.assert_idle()


@overlap
def test_the_prefill_node_ends_requests_of_no_token_and_of_one(zoo: Zoo, llama: Path, overlap: bool) -> None:
    """Also for the decode node, if both have such a request. What was computed for it is found by the next one."""
    ids, first = zoo.prompts("llama")[0], zoo.greedy("llama", 0)[:1]
    with start("1P1D", llama, overlap=overlap) as cluster:
        client = Client(cluster)
        for num_new, is_alone, num_cached in ((0, True, 0), (1, True, 48), (1, False, 48)):
            wanted = params(max_new_tokens=num_new)
            key = client.submit_to("p0", ids, wanted) if is_alone else client.submit(ids, wanted)
            cluster.run_all()
            answer = cluster.router.answers[key]
            assert (answer.token_ids, answer.finish) == (first[:num_new], Finish("length"))
            assert answer.reports[0].cached_tokens == num_cached
            cluster.assert_idle()


@topology
@overlap
@pytest.mark.parametrize("position", [0, 1, 9])
def test_eos_ends_the_request(zoo: Zoo, topology: str, overlap: bool, position: int) -> None:
    """Position 0 is the prefill node's token; under overlap a step too many has been launched behind each."""
    expected, eos = until_first(zoo.greedy("llama", 2), position)
    with start(topology, zoo.with_eos("llama", [511, eos]), overlap=overlap) as cluster:
        client = Client(cluster)
        key = client.submit(zoo.prompts("llama")[2], params(ignore_eos=False))
        ignoring = client.submit(zoo.prompts("llama")[2], params(ignore_eos=True))
        cluster.run_all()
        answer = cluster.router.answers[key]
        assert (answer.token_ids, answer.finish) == (expected, Finish("stop", eos))
        assert cluster.tokens(ignoring) == zoo.greedy("llama", 2)
        assert cluster.router.answers[ignoring].finish == Finish("length")
        cluster.assert_idle()


@topology
@pytest.mark.parametrize("min_new_tokens", [1, 4, 20])
def test_min_new_tokens_masks_every_end(zoo: Zoo, topology: str, min_new_tokens: int) -> None:
    greedy = zoo.greedy("llama", 2)
    eos_ids, stops = (greedy[0], greedy[2]), (greedy[1], greedy[3])
    folder = zoo.with_eos("llama", eos_ids)
    wanted = params(min_new_tokens=min_new_tokens, stop_token_ids=stops, ignore_eos=False)
    expected = reference_tokens(folder, zoo.prompts("llama")[2], wanted, eos_ids)
    with start(topology, folder) as cluster:
        (tokens,) = Client(cluster).tokens([zoo.prompts("llama")[2]], wanted)
    assert tokens == expected
    assert min_new_tokens < len(tokens)
    assert not set(tokens[:min_new_tokens]) & {*eos_ids, *stops}


@topology
def test_min_new_tokens_counts_what_an_earlier_attempt_produced(zoo: Zoo, topology: str) -> None:
    greedy = zoo.greedy("llama", 2)
    folder = zoo.with_eos("llama", (greedy[0],))
    wanted = params(min_new_tokens=6, ignore_eos=False)
    expected = reference_tokens(folder, zoo.prompts("llama")[2], wanted, (greedy[0],))
    with start(topology, folder) as cluster:
        key = Client(cluster).submit(zoo.prompts("llama")[2], wanted, output_ids=expected[:3])
        cluster.run_all()
        assert cluster.tokens(key) == expected
        cluster.assert_idle()


def until_first(tokens: list[int], position: int) -> tuple[list[int], int]:
    """The outputs when the token at `position`, or an equal one before it, ends the request."""
    end = tokens[position]
    return tokens[: tokens.index(end) + 1], end
