"""The sentence about both fleets, from samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.api.live_feed import FleetSample, Sample, fleet_verdict

FLEET = FleetSample(
    num_nodes=1,
    num_running_reqs=0,
    num_queue_reqs=0,
    num_transferring_reqs=0,
    tokens_per_s=0,
    kv_bytes_per_s=2_500_000,
    num_pages=0,
    num_free_pages=0,
    num_cached_pages=0,
    num_held_pages=0,
)
SAMPLE = Sample(
    time=0,
    num_running_reqs=3,
    num_queue_reqs=7,
    tokens_per_s=1234.5,
    reqs_per_s=1,
    rejected_per_s=0,
    ttft_s=(0.0123, 0.25, 3.5),
    itl_s=None,
    prefill=FLEET,
    decode=FLEET,
)
NODES = {"num_nodes": 2, "num_pages": 1000}


def samples(
    prefill: Sequence[dict[str, Any]] = ({},), decode: Sequence[dict[str, Any]] = ({},)
) -> list[Sample]:
    """Ten seconds; a fleet of which less is given stays as it is."""

    def at(second: int, fleet: Sequence[dict[str, Any]]) -> Any:
        return msgspec.structs.replace(FLEET, **NODES, **fleet[min(second, len(fleet) - 1)])

    return [
        msgspec.structs.replace(SAMPLE, prefill=at(second, prefill), decode=at(second, decode))
        for second in range(10)
    ]


def test_nothing_is_known_before_the_first_sample() -> None:
    assert fleet_verdict([]) == ""


def test_an_idle_fleet_and_a_busy_one_without_a_queue_have_no_bottleneck() -> None:
    assert fleet_verdict(samples()) == "no bottleneck"
    busy = [{"prefill_busy": 1.9, "num_queue_reqs": second % 2} for second in range(10)]
    full = [{"num_held_pages": 990, "kv_under_way": 1.5}]
    assert fleet_verdict(samples(busy, full)) == "no bottleneck"


def test_prefill() -> None:
    growing = [{"prefill_busy": 1.68, "num_queue_reqs": 2 * second} for second in range(10)]
    assert fleet_verdict(samples(growing)) == (
        "prefill is the bottleneck: 84 % busy, queue growing (18 waiting)"
    )
    assert "queue shrinking (0 waiting)" in fleet_verdict(samples(growing[::-1]))
    steady = [{"prefill_busy": 2.4, "num_queue_reqs": 7}]
    assert fleet_verdict(samples(steady)) == (
        "prefill is the bottleneck: 100 % busy, queue steady (7 waiting)"
    )


def test_requests_that_wait_for_a_decode_node_are_not_the_prefill_nodes_queue() -> None:
    waiting = [{"prefill_busy": 1.9, "num_queue_reqs": 40, "num_bootstrapping_reqs": 40}]
    full = [{"num_held_pages": 970, "num_bootstrapping_reqs": 40, "num_queue_reqs": 40}]
    assert fleet_verdict(samples(waiting, full)) == (
        "decode is the bottleneck: 97 % of its KV pages in use, queue steady (40 waiting)"
    )


def test_places_of_decode_nodes() -> None:
    rows = [{"num_held_pages": 100, "num_bootstrapping_reqs": 3}]
    assert fleet_verdict(samples(decode=rows)) == (
        "decode is the bottleneck: every place in its batches taken, queue steady (3 waiting)"
    )


def test_transfer() -> None:
    slow = [{"kv_under_way": 4.0 + second, "kv_bytes_per_s": 4e8} for second in range(10)]
    assert fleet_verdict(samples(decode=slow)) == (
        "transfer is the bottleneck: 8 transfers under way at once to 2 decode nodes, at 0.4 GB/s, growing"
    )


def test_of_several_the_one_where_most_requests_wait() -> None:
    prefill = [{"prefill_busy": 2.0, "num_queue_reqs": 10}]
    decode = [{"num_held_pages": 1000, "num_bootstrapping_reqs": 30}]
    assert fleet_verdict(samples(prefill, decode)).startswith("decode")
    decode = [{"num_held_pages": 1000, "num_bootstrapping_reqs": 5, "kv_under_way": 3.0}]
    assert fleet_verdict(samples(prefill, decode)).startswith("prefill")


def test_only_the_last_seconds_count() -> None:
    busy = samples([{"prefill_busy": 2.0, "num_queue_reqs": 10}])
    assert fleet_verdict(busy + samples()) == "no bottleneck"
