"""/metrics against its contract: names, types and labels, as Prometheus reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from router.dispatch.running_req import Cause
from shared.protocol.messages import Failed, Finish, Load, TokenEntry
from tests.unit.router.fakes import joined_pair, write_model
from tests.unit.router.test_placement import Fleet

OF_NODES: Mapping[str, tuple[str, ...]] = {
    "gauge": (
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:cache_hit_rate",
        "sglang:gen_throughput",
        "baton:num_queued_tokens",
        "baton:prefill_tokens_per_second",
        "baton:reserve_wait_seconds",
        "baton:num_bootstrapping_reqs",
        "baton:num_transferring_reqs",
        "baton:num_retracted_reqs",
        "baton:links_up",
        "baton:kv_transfer_bytes_per_second",
        "baton:num_pages",
        "baton:num_free_pages",
        "baton:num_evictable_pages",
        "baton:num_held_pages",
        "baton:num_window_pages",
        "baton:num_available_window_pages",
        "baton:num_host_pages",
        "baton:num_free_host_pages",
    ),
    "counter": (
        "baton:prefill_busy_seconds",
        "baton:node_prompt_tokens",
        "baton:node_cached_tokens",
        "baton:node_fetched_tokens",
        "baton:node_ahead_tokens",
        "baton:node_ahead_evicted_tokens",
        "baton:node_generated_tokens",
        "baton:kv_transfer_bytes",
        "baton:kv_transfer_busy_seconds",
        "baton:retractions",
        "baton:retractions_host",
        "baton:retractions_recompute",
        "baton:retraction_waits",
        "baton:jump_forward_tokens",
    ),
}
OF_THE_ROUTER: Mapping[str, tuple[str, ...]] = {
    "gauge": (
        "baton:num_queued_reqs",
        "baton:http_connections",
        "baton:http_unsent_bytes",
    ),
    "counter": (
        "sglang:prompt_tokens",
        "sglang:generation_tokens",
        "sglang:cached_tokens",
        "sglang:num_requests",
        "sglang:num_aborted_requests",
        "baton:num_failed_requests",
        "baton:num_failovers",
        "baton:num_poison_requests",
        "baton:num_moves",
        "baton:num_inexact_continuations",
        "baton:num_failed_moves",
        "baton:num_rejected_requests",
        "baton:num_late_requests",
    ),
    "histogram": (
        "sglang:time_to_first_token_seconds",
        "sglang:inter_token_latency_seconds",
        "sglang:e2e_request_latency_seconds",
        "baton:kv_transfer_seconds",
    ),
}


def families(text: str) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(text))
    by_name = {family.name: family for family in found}
    assert len(by_name) == len(found), "Prometheus refuses a scrape that has a figure twice"
    return by_name


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metric]:
    """What a router tells that has served one request."""
    model = write_model(tmp_path_factory.mktemp("metrics"))

    async def run() -> str:
        async with joined_pair(model) as (nodes, _, client):
            nodes[1].load = Load(num_pages=10, num_free_pages=4, num_held_pages=2, num_links=1)
            assert (await client.post("/generate", json={"text": "a"})).status_code == 200
            response = await client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            return response.text

    return families(asyncio.run(run()))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in OF_NODES.items() for name in names]
)
def test_of_nodes(exported: dict[str, Metric], kind: str, name: str) -> None:
    family = exported[name]
    assert family.type == kind
    suffix = "_total" if kind == "counter" else ""
    assert {(sample.name, *sorted(sample.labels.items())) for sample in family.samples} == {
        (name + suffix, ("model_name", "tiny"), ("node", f"{role}-0"), ("role", role))
        for role in ("prefill", "decode")
    }


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in OF_THE_ROUTER.items() for name in names]
)
def test_of_the_router(exported: dict[str, Metric], kind: str, name: str) -> None:
    family = exported[name]
    assert family.type == kind
    assert all((s.labels["model_name"], s.labels["role"]) == ("tiny", "router") for s in family.samples)
    suffixes = {"gauge": {""}, "counter": {"_total"}, "histogram": {"_bucket", "_count", "_sum"}}[kind]
    assert {sample.name.removeprefix(name) for sample in family.samples} == suffixes


def test_stages(exported: dict[str, Metric]) -> None:
    family = exported["baton:stage_duration_seconds"]
    assert family.type == "histogram"
    seen = {(s.labels["role"], s.labels["stage"]) for s in family.samples}
    assert seen >= {("prefill", "queued"), ("decode", "transferring")}


def test_figures_of_nodes_are_those_of_their_pongs(exported: dict[str, Metric]) -> None:
    def of_decode(name: str) -> float:
        (value,) = [s.value for s in exported[name].samples if s.labels["node"] == "decode-0"]
        return value

    assert (of_decode("baton:num_free_pages"), of_decode("baton:num_held_pages")) == (4, 2)
    assert (of_decode("sglang:token_usage"), of_decode("baton:links_up")) == (pytest.approx(0.6), 1)


def test_nothing_is_told_without_being_listed_here(exported: dict[str, Metric]) -> None:
    listed = {name for names in (*OF_NODES.values(), *OF_THE_ROUTER.values()) for name in names}
    told = {name for name in exported if not name.endswith("_created")}
    assert told == listed | {"baton:stage_duration_seconds", "baton:num_slow_starts"}


def test_every_token_counts_between_two_messages() -> None:
    fleet = Fleet(1)
    req = fleet.start()
    decode = req.nodes[-1]
    fleet.dispatcher.on_tokens(decode, (TokenEntry(req.key, 0, (7,)),))
    fleet.dispatcher.on_tokens(decode, (TokenEntry(req.key, 1, (7, 7, 7)),))
    fleet.dispatcher.on_tokens(decode, (TokenEntry(req.key, 4, (), Finish("length")),))
    family = families(fleet.dispatcher._metrics.export().decode())["sglang:inter_token_latency_seconds"]
    (count,) = [s.value for s in family.samples if s.name.endswith("_count")]
    assert count == 3


def test_a_sequence_that_is_sent_elsewhere_is_a_failover() -> None:
    fleet = Fleet(2)
    req = fleet.start()
    fleet.dispatcher.on_failed(req.nodes[-1], Failed(req.key, 500, "the forward failed"))
    counter = families(fleet.dispatcher._metrics.export().decode())["baton:num_failovers"]
    counts = {s.labels["cause"]: s.value for s in counter.samples if s.name.endswith("_total")}
    assert counts == dict.fromkeys(Cause, 0) | {"node_failed": 1}


@pytest.mark.parametrize(("status", "counts"), [(500, 1), (503, 1), (400, 0)])
def test_a_bad_request_is_no_failure(status: int, counts: int) -> None:
    fleet = Fleet(1)
    req = fleet.start()
    while not req.ended:
        fleet.dispatcher.on_failed(req.nodes[-1], Failed(req.key, status, "regex: missing )"))
        fleet.wait(10)
    counter = families(fleet.dispatcher._metrics.export().decode())["baton:num_failed_requests"]
    assert [s.value for s in counter.samples] == [counts]


def test_a_deadline_that_passed_is_a_failure() -> None:
    fleet = Fleet(1)
    fleet.dispatcher.expire(fleet.start())
    counter = families(fleet.dispatcher._metrics.export().decode())["baton:num_failed_requests"]
    assert [s.value for s in counter.samples] == [1]
