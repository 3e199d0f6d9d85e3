"""/metrics against its contract: names, types and labels, as Prometheus reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from router.dispatch.metrics import Metrics
from router.dispatch.running_req import Cause
from shared.protocol.messages import Finish, Load
from tests.patience import eventually
from tests.unit.router.dispatched import SeenFleet, families
from tests.unit.router.fakes import joined_pair, write_model

OF_NODES = """
sglang:num_running_reqs sglang:num_queue_reqs sglang:token_usage sglang:cache_hit_rate sglang:gen_throughput
baton:num_queued_tokens baton:prefill_tokens_per_second baton:reserve_wait_seconds baton:num_bootstrapping_reqs
baton:num_transferring_reqs baton:num_retracted_reqs baton:links_up baton:kv_transfer_bytes_per_second
baton:num_pages baton:num_free_pages baton:num_evictable_pages baton:num_held_pages baton:num_window_pages
baton:num_available_window_pages baton:num_host_pages baton:num_free_host_pages
baton:prefill_busy_seconds_total baton:node_prompt_tokens_total baton:node_cached_tokens_total
baton:node_fetched_tokens_total baton:node_ahead_tokens_total baton:node_ahead_evicted_tokens_total
baton:node_generated_tokens_total baton:kv_transfer_bytes_total baton:kv_transfer_busy_seconds_total
baton:retractions_total baton:retractions_host_total baton:retractions_recompute_total
baton:retraction_waits_total baton:jump_forward_tokens_total
"""
OF_THE_ROUTER = """
baton:num_queued_reqs baton:http_connections baton:http_unsent_bytes
sglang:prompt_tokens_total sglang:generation_tokens_total sglang:cached_tokens_total sglang:num_requests_total
sglang:num_aborted_requests_total baton:num_failed_requests_total baton:num_failovers_total
baton:num_poison_requests_total baton:num_moves_total baton:num_inexact_continuations_total
baton:num_failed_moves_total baton:num_rejected_requests_total baton:num_late_requests_total
sglang:time_to_first_token_seconds_bucket sglang:inter_token_latency_seconds_bucket
sglang:e2e_request_latency_seconds_bucket baton:kv_transfer_seconds_bucket
"""
BY_STAGE = {"baton:stage_duration_seconds", "baton:num_slow_starts"}
SUFFIXES = {"counter": {"_total"}, "gauge": {""}, "histogram": {"_bucket", "_count", "_sum"}}


def family_of(name: str) -> tuple[str, str]:
    """The family of a sample and its type, which its name tells."""
    for suffix, kind in (("_total", "counter"), ("_bucket", "histogram")):
        if name.endswith(suffix):
            return name.removesuffix(suffix), kind
    return name, "gauge"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metric]:
    """What a router tells that has served one request."""
    model = write_model(tmp_path_factory.mktemp("metrics"))

    async def run() -> str:
        async with joined_pair(model) as (nodes, _, client):
            nodes[1].load = Load(num_pages=10, num_free_pages=4, num_held_pages=2, num_links=1, num_running=3)
            before = families((await client.get("/metrics")).text)["sglang:num_aborted_requests"]
            assert [sample.value for sample in before.samples] == [0]
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}}
            assert (await client.post("/generate", json=body)).status_code == 200
            response = await client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            return response.text

    return families(asyncio.run(run()))


@pytest.mark.parametrize("name", OF_NODES.split())
def test_of_nodes(exported: dict[str, Metric], name: str) -> None:
    family, kind = family_of(name)
    assert exported[family].type == kind
    assert {(sample.name, *sorted(sample.labels.items())) for sample in exported[family].samples} == {
        (name, ("model_name", "tiny"), ("node", f"{role}-0"), ("role", role))
        for role in ("prefill", "decode")
    }


@pytest.mark.parametrize("name", OF_THE_ROUTER.split())
def test_of_the_router(exported: dict[str, Metric], name: str) -> None:
    family, kind = family_of(name)
    samples = exported[family].samples
    assert exported[family].type == kind
    assert all((s.labels["model_name"], s.labels["role"]) == ("tiny", "router") for s in samples)
    assert {sample.name.removeprefix(family) for sample in samples} == SUFFIXES[kind]


def test_stages(exported: dict[str, Metric]) -> None:
    family = exported["baton:stage_duration_seconds"]
    assert family.type == "histogram"
    of = {(s.labels["role"], s.labels["stage"]): s.value for s in family.samples if s.name.endswith("_sum")}
    assert of["prefill", "queued"] == 0.5 and ("decode", "transferring") in of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sglang:prompt_tokens_total", 3),
        ("sglang:generation_tokens_total", 5),
        ("sglang:cached_tokens_total", 2),
        ("sglang:num_requests_total", 1),
        ("sglang:time_to_first_token_seconds_count", 1),
        ("sglang:inter_token_latency_seconds_count", 4),
        ("sglang:e2e_request_latency_seconds_count", 1),
        ("baton:kv_transfer_seconds_count", 1),
    ],
)
def test_what_one_request_counts(exported: dict[str, Metric], name: str, value: float) -> None:
    samples = (sample for family in exported.values() for sample in family.samples)
    assert [sample.value for sample in samples if sample.name == name] == [value]


async def test_a_node_that_is_lost_has_no_figures(model_folder: Path) -> None:
    async with joined_pair(model_folder) as ((_, decode), _, client):
        await decode.stop()

        async def forgotten() -> bool:
            return 'node="decode-0"' not in (await client.get("/metrics")).text

        await eventually(forgotten)


def test_every_cause_of_failovers_is_told_before_there_is_one(exported: dict[str, Metric]) -> None:
    samples = exported["baton:num_failovers"].samples
    assert {s.labels["cause"]: s.value for s in samples if s.name.endswith("_total")} == dict.fromkeys(
        Cause, 0
    )


def test_figures_of_nodes_are_those_of_their_pongs(exported: dict[str, Metric]) -> None:
    def of_decode(name: str) -> float:
        (value,) = [s.value for s in exported[name].samples if s.labels["node"] == "decode-0"]
        return value

    assert (of_decode("baton:num_free_pages"), of_decode("baton:num_held_pages")) == (4, 2)
    assert of_decode("sglang:num_running_reqs") == 3
    assert (of_decode("sglang:token_usage"), of_decode("baton:links_up")) == (pytest.approx(0.6), 1)


def test_nothing_is_told_without_being_listed_here(exported: dict[str, Metric]) -> None:
    told = {name for name in exported if not name.endswith("_created")}
    assert told == {family_of(name)[0] for name in (OF_NODES + OF_THE_ROUTER).split()} | BY_STAGE


def test_every_token_counts_between_two_messages() -> None:
    fleet = SeenFleet(1)
    req = fleet.start()
    for ids in ((7,), (7, 7, 7), ()):
        fleet.tell(req, *ids, finish=None if ids else Finish("length"))
        fleet.wait(0.6)
    samples = fleet.metric("sglang:inter_token_latency_seconds").samples
    assert [s.value for s in samples if s.name.endswith("_count")] == [3]
    assert [s.value for s in samples if s.name.endswith("_sum")] == pytest.approx([0.6])


def test_the_tokens_of_a_step_are_counted_together() -> None:
    metrics = Metrics(lambda: "tiny")
    metrics.later_tokens({0.1: 1, 0.5: 9})
    assert metrics.num_tokens == 10
    assert b'sglang:generation_tokens_total{model_name="tiny",role="router"} 10.0' in metrics.export()
    metrics.roll()
    assert metrics.itl.percentiles((0.05, 0.2)) == pytest.approx((0.1, 0.5), rel=0.05)


@pytest.mark.parametrize(("status", "counts"), [(500, 1), (503, 1), (400, 0), (None, 1)])
def test_what_counts_as_a_failed_request(status: int | None, counts: int) -> None:
    """Not a bad request. None: a deadline that passed."""
    fleet = SeenFleet(1)
    req = fleet.start()
    if status is None:
        fleet.dispatcher.expire(req)
    while not req.ended:
        fleet.fail(req, req.nodes[-1], status or 0)
        fleet.wait(10)
    assert fleet.figure("baton:num_failed_requests") == counts
