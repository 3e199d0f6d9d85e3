"""What each bench makes of its measurements, on measurements whose outcome is plain to see."""

from __future__ import annotations

import pytest

from tests.bench import attention, decode, failover, interference, moves, overlap, prefill, trace_serving
from tests.bench.attention import Heads
from tests.bench.models import Shape
from tests.bench.servers import TokenStream

SHAPE = Shape(
    architecture="",
    model_type="",
    hidden_size=1000,
    num_layers=1,
    num_heads=10,
    num_kv_heads=10,
    head_dim=100,
    intermediate_size=2000,
    tie_word_embeddings=True,
)
"""10 M weights in the layer (20 MB, 20 MFLOP a token), 32 M in lm_head, 4 kB of KV a token."""


def test_a_decode_step_is_bound_by_the_longer_of_reading_and_arithmetic() -> None:
    assert SHAPE.weight_nbytes == 84_000_000 and SHAPE.kv_nbytes == 4000
    reading = decode.figures(SHAPE, 1, 4000, gb_s=[10.0], gflop_s=[1000.0], step_s=[0.020])
    assert reading["bound_by"] == "reading"
    assert reading["ratio"] == reading["ratio_read"] == 0.5
    assert reading["tokens_s"] == 50
    arithmetic = decode.figures(SHAPE, 4, 1000, gb_s=[10.0], gflop_s=[16.8], step_s=[0.040])
    assert arithmetic["bound_by"] == "arithmetic"
    assert arithmetic["ratio"] == pytest.approx(0.5)
    assert arithmetic["ratio_read"] == 0.25


def test_the_limit_of_a_decode_step_is_that_of_its_own_round() -> None:
    busy = decode.figures(SHAPE, 1, 4000, [10.0, 5.0, 10.0], [1e6, 1e6, 1e6], [0.020, 0.040, 0.020])
    assert busy["ratio_spread"] == [0.5, 0.5]
    assert busy["step_ms_spread"] == [20, 40]


def test_a_prefill_is_compared_with_and_without_attention() -> None:
    figures = prefill.figures(SHAPE, 0, 99, gflop_s=[4.088], prefill_s=[1.0])
    assert figures["ratio"] == pytest.approx((99 * 20e6 + 64e6) / 4.088e9, abs=1e-3)
    attention_flops = 4 * 10 * 100 * 99 * 100 / 2
    assert figures["ratio_all"] == pytest.approx((99 * 20e6 + 64e6 + attention_flops) / 4.088e9, abs=1e-3)


def test_decode_attention_is_compared_with_reading_and_with_its_twin() -> None:
    heads = Heads(num=4, num_kv=2, dim=125)
    figures = attention.decode_figures(heads, 1000, gb_s=[20.0], torch_s=[1e-3], call_s=[1e-4])
    assert (figures["gb_s"], figures["ratio"], figures["speedup"]) == (10, 0.5, 10)


def test_extend_attention_computes_the_causal_half() -> None:
    heads = Heads(num=1, num_kv=1, dim=100)
    figures = attention.extend_figures(heads, 0, 99, gflop_s=[1.98], torch_s=[4e-3], call_s=[2e-3])
    assert (figures["gflop_s"], figures["ratio"], figures["speedup"]) == (0.99, 0.5, 2)


def test_overlap_is_worded_by_medians_and_by_the_share_of_each_block() -> None:
    figures = overlap.figures([(0.012, 0.010, 0.010), (0.012, 0.011, 0.010), (0.012, 0.012, 0.010)], 32)
    assert figures["hidden"] == 0.5 and figures["hidden_spread"] == [0.0, 1.0]
    assert (figures["forward_ms"], figures["cost_ms"]) == (10, 2)
    assert figures["speedup_bound"] == pytest.approx(1.2)


def test_gaps_beside_a_prefill_are_those_that_touch_it() -> None:
    running = TokenStream(0.0, times=[1.0, 2.0, 5.0, 6.0, 7.0])
    long = TokenStream(2.5, times=[4.0])
    seen = interference.Seen.of([running], [long])
    assert seen.beside == [3000] and seen.quiet == [1000, 1000, 1000]
    assert seen.ttfts == [1500] and seen.p99 == 3000
    split = interference.Seen(beside=[10.0, 1000.0], quiet=[5.0], ttfts=[1.0])
    row = interference.row("0P1D", [seen], [split.p99])
    assert (row["itl_p99_ms"], row["p99_ratio"], row["itl_max_ms"]) == (3000, 3, 3000)


def test_a_replayed_trace_counts_from_the_first_request_to_the_last_token() -> None:
    good = TokenStream(10.0, times=[10.2, 10.22, 10.24], meta={"completion_tokens": 5})
    late = TokenStream(11.0, times=[12.0], meta={"completion_tokens": 1})
    row = trace_serving.row("1P1D", 1.0, [[good, late]])
    assert row["output_tokens_s"] == 3
    assert row["goodput"] == 0.5
    assert row["ttft_p50_ms"] == pytest.approx(200) and row["ttft_p99_ms"] == pytest.approx(1000)
    assert row["itl_p99_ms"] == pytest.approx(20)


def test_the_trace_fits_the_built_in_model() -> None:
    requests = trace_serving.workload(2.0)
    assert len(requests) == trace_serving.NUM_REQUESTS
    assert requests[0].at_s == 0
    assert [r.input_len for r in requests] == [r.input_len for r in trace_serving.workload(1.0)]


def test_a_cost_too_small_to_tell_what_becomes_of_it_does_not_count() -> None:
    rows = [
        {"device": device, "cost_ms": cost, "wall_off_ms": 10.0, "hidden": hidden}
        for device, cost, hidden in (("builtin", 1.0, 0.7), ("builtin", 0.1, -3.0), ("timed wait", 1.0, 0.9))
    ]
    assert overlap.summary(rows) == {
        "devices": ["builtin"],
        "least_hidden": 0.7,
        "least_hidden_timed": 0.9,
        "rows_left_out": 1,
    }


def test_a_pause_is_compared_with_the_prefill_of_its_rank() -> None:
    row = failover.killed_row([(0.2, 0.1), (0.3, 0.3)], cached=True)
    assert (row["streams"], row["prompt_cached"]) == (2, True)
    assert (row["pause_p50_ms"], row["pause_p99_ms"]) == (200, 300)
    assert (row["prefill_p50_ms"], row["prefill_p99_ms"]) == (100, 300)
    assert (row["ratio_p50"], row["ratio_p99"]) == (1, 2)


def test_a_moved_stream_is_measured_in_its_own_steps() -> None:
    slow = moves.Pause(moving_s=0.06, quiet_s=0.03, step_s=0.03)
    fast = moves.Pause(moving_s=0.03, quiet_s=0.02, step_s=0.01)
    row = moves.moved_row(300, [slow, fast])
    assert (row["pause_steps_p50"], row["pause_steps_p99"]) == (2, 3)
    assert (row["quiet_steps_p50"], row["quiet_steps_p99"]) == (1, 2)


def test_detection_is_compared_with_its_limit() -> None:
    row = failover.detection_row("prefill node killed", [0.02, 0.05], 0.1)
    assert (row["times"], row["p50_ms"], row["p99_ms"], row["p99_of_limit"]) == (2, 20, 50, 0.5)
