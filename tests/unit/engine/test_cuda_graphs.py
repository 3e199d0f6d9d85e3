"""Replayed forwards against eager ones, to the bit: every bucket, its padding, and what a replay may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.config import CacheOptions, ScheduleOptions
from shared.engine.attention import TorchAttention
from shared.engine.backends import choose_graphs
from shared.engine.build import make_ledger
from shared.engine.cuda.cuda_graphs import Graphs, graph_shapes
from shared.engine.forward_stream import CpuForwardStream
from shared.engine.input_block import BlockShape, padding_batch
from shared.engine.launcher import Launcher
from shared.engine.model_runner import ModelRunner
from shared.engine.progress import Progress
from shared.engine.sampling_inputs import LogprobInputs, LogprobShare, SamplingInputs
from shared.engine.torch_backend import TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.kvcache.windowed_pool import WindowedKVPool
from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams, TokenBias
from shared.scheduling.batcher import Batcher
from shared.scheduling.req import Req
from shared.timeline import Timeline
from tests.backend_rig import CPU, LIMITS, NUM_ROWS, PAGE_SIZE, PAGES_A_ROW, batch_of, kv_pool
from tests.fake_graphs import BlockAttention, FakeGraphPool
from tests.graph_rig import SHAPES, Engine, check_same
from tests.modelzoo import make_model, random_prompt
from tests.weight_tensors import tensors_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


def test_every_size_of_a_decode_step(folder: Path) -> None:
    eager, graphed = Engine(folder), Engine.captured(folder)
    prompts = {row: (0, random_prompt(3 + 5 * row, seed=row)) for row in range(NUM_ROWS)}
    check_same(eager, graphed, batch_of(prompts, {}))
    assert graphed.num_replays == 0, "too many tokens for any graph"
    lengths = {row: len(ids) for row, (_, ids) in prompts.items()}
    for num in [*range(1, NUM_ROWS + 1), 3, 1]:
        check_same(eager, graphed, batch_of({}, {row: lengths[row] for row in range(num)}))
        for row in range(num):
            lengths[row] += 1
    assert graphed.num_replays == NUM_ROWS + 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extends_and_mixed_batches_at_every_edge(folder: Path, shape: BlockShape) -> None:
    """One token less than the bucket has, as many, and one more; with a prefix, and beside a decode step."""
    eager, graphed = Engine(folder), Engine.captured(folder)
    largest = SHAPES[-1].num_tokens
    for num_tokens in range(max(shape.num_tokens - 1, 1), shape.num_tokens + 2):
        most_decodes = min(shape.num_sequences, num_tokens) - 1
        for num_decodes in {0, min(1, most_decodes), most_decodes}:
            prompts = {row: (0, random_prompt(6 + row, seed=row)) for row in range(1, 1 + num_decodes)}
            if prompts:
                check_same(eager, graphed, batch_of(prompts, {}))
            at, before = 0, graphed.num_replays
            for seed in range(2):  # the second one has the first one's tokens as its prefix
                ids = random_prompt(num_tokens - num_decodes, seed=seed)
                decodes = {row: len(prompt) + seed for row, (_, prompt) in prompts.items()}
                check_same(eager, graphed, batch_of({0: (at, ids)}, decodes))
                at += len(ids)
            assert graphed.num_replays - before == 2 * (num_tokens <= largest)


def test_a_forward_that_no_bucket_holds_is_launched_kernel_by_kernel(folder: Path) -> None:
    """Too many sequences for its tokens, and a page table for which the block has no room."""
    eager, graphed = Engine(folder), Engine.captured(folder, [BlockShape(16, 2)])
    check_same(eager, graphed, batch_of({row: (0, [row, 5]) for row in range(3)}, {}))
    wide = batch_of({0: (0, [5, 6])}, {})
    table_BP = np.zeros((1, 1 << 20), dtype=np.int32)
    table_BP[0, 0] = wide.page_table_BP[0, 0]
    check_same(eager, graphed, replace(wide, page_table_BP=table_BP))
    assert graphed.num_replays == 0
    check_same(eager, graphed, batch_of({0: (2, [7, 8])}, {}))
    assert graphed.num_replays == 1
    one, num_words = batch_of({0: (4, [9, 4])}, {}), graphed.backend._inputs._ring.nbytes // 4
    table_BP = np.pad(one.page_table_BP, ((0, 0), (0, num_words * 2 // 3)))
    check_same(eager, graphed, replace(one, page_table_BP=table_BP, window_table_BP=table_BP))
    assert graphed.num_replays == 1, "there is room for one such table, and not for two"
    check_same(eager, graphed, replace(one, page_table_BP=table_BP))
    assert graphed.num_replays == 2


def test_the_block_has_room_for_the_page_tables_of_all_rows(folder: Path) -> None:
    """That of layers with windows too, where these have a pool of their own."""
    decoder = Engine(folder).decoder
    one = kv_pool(decoder.config, 2, PAGE_SIZE, torch.float32, num_layers=1)
    pool = WindowedKVPool(one, one, (True, False))
    backend = TorchBackend(torch_kernels(CPU), decoder, pool, Progress(), LIMITS)
    steps = batch_of({}, dict.fromkeys(range(NUM_ROWS), LIMITS.context_length - 1))
    batch = replace(steps, window_table_BP=steps.page_table_BP)
    largest = BlockShape(LIMITS.max_tokens, NUM_ROWS)
    assert backend._inputs.has_room(batch, largest, TorchAttention().work(batch))


def test_a_replay_enters_tokens_of_the_host_and_leaves_what_prompt_logprobs_need(folder: Path) -> None:
    eager, graphed = Engine(folder), Engine.captured(folder)
    wanted = LogprobInputs(
        rows_N=np.array([1, 2, 4]),
        targets_N=np.array([7, 8, 9]),
        token_ids_NM=np.zeros((3, 0), dtype=np.int64),
        top_num=1,
        shares=(LogprobShare(0, 3, 1, 0),),
    )
    chunk = replace(
        batch_of({0: (0, [5, 6, 7, 8, 9])}, {}),
        sampled_B=np.empty(0, dtype=np.int64),
        sampling=SamplingInputs(input_logprobs=wanted),
    )
    check_same(eager, graphed, chunk)
    check_same(eager, graphed, batch_of({3: (0, [5, 6, 7])}, {}))
    check_same(eager, graphed, replace(batch_of({}, {0: 5, 3: 3}), future_writes=((0, 40),)))
    check_same(eager, graphed, replace(batch_of({0: (6, [4])}, {3: 4}), future_writes=((3, 41),)))
    assert graphed.num_replays == 4


def test_a_replay_reads_and_writes_nothing_but_what_stays_where_it_is(folder: Path) -> None:
    graphed = Engine.captured(folder)
    results = graphed.backend._results
    assert results is not None
    weights = graphed.decoder.weights
    static = [
        *tensors_of(weights),
        *graphed.decoder.rotary_waves,
        graphed.pool.buffer_LSNHPD,
        graphed.future_map.last_token_R,
        results.hidden_TD,
        results.logits_SV,
        graphed.backend._inputs._ring.on_device,
    ]
    ranges = [(memory.data_ptr(), memory.nbytes()) for memory in (x.untyped_storage() for x in static)]
    for at, tensor in graphed.graph_pool.found.items():
        assert any(first <= at < first + nbytes for first, nbytes in ranges), tensor.shape


def test_a_replay_is_one_copy_and_counts_its_layers(folder: Path) -> None:
    graphed = Engine.captured(folder)
    num_layers, num_copies = graphed.progress.count, graphed.num_copies
    graphed.forward(batch_of({0: (0, [5, 6, 7])}, {}))
    assert graphed.num_replays == 1
    assert graphed.num_copies - num_copies == 1
    assert graphed.progress.count - num_layers == graphed.pool.num_layers


REQUESTS = {
    "greedy": (40, 12, {"temperature": 0.0}),
    "short": (1, 3, {"temperature": 0.0}),
    "drawn": (17, 9, {"seed": 3, "top_p": 0.9, "top_k": 40}),
    "penalized": (9, 14, {"seed": 4, "frequency_penalty": 0.8, "repetition_penalty": 1.3}),
    "told": (23, 6, {"temperature": 0.0, "logprobs": LogprobParams(start_len=5, top_num=3)}),
    "biased": (5, 20, {"seed": 6, "min_new_tokens": 4, "logit_bias": (TokenBias(9, 3.0),)}),
    "late": (30, 8, {"seed": 7}),
}
"""Length of the prompt, most tokens of output, and what else was asked for."""


def served(engine: Engine, *, overlap: bool) -> dict[str, tuple[list[int], object]]:
    """Ids and logprobs of all REQUESTS, which arrive one in each turn, by the node's own loop."""
    options = ScheduleOptions(max_running_requests=NUM_ROWS, chunked_prefill_size=12, enable_mixed_chunk=True)
    cache = CacheOptions(page_size=PAGE_SIZE)
    ledger = make_ledger(engine.pool.num_pages, cache, NUM_ROWS, LIMITS.context_length)
    runner = ModelRunner(engine.backend, NUM_ROWS, CPU)
    runner.capture_graphs()
    stream = CpuForwardStream(runner)
    launcher = Launcher(stream, ledger, frozenset({2}), overlap=overlap, debug_checks=True)
    batcher = Batcher(ledger, options)
    arriving, running = [*REQUESTS.items()], {}
    told: dict[str, list[object]] = {name: [] for name in REQUESTS}
    answers = {}
    while arriving or running:
        if arriving:
            name, (num_ids, max_new_tokens, params) = arriving.pop(0)
            work = Work(
                tuple(random_prompt(num_ids, seed=num_ids)),
                SamplingParams(max_new_tokens=max_new_tokens, **params),  # type: ignore[arg-type]
            )
            running[name] = Req(ReqKey("router", name), work, Timeline(Role.DECODE), max_new_tokens)
            batcher.add(running[name])
        with launcher.planning():
            plan = batcher.plan()
        outcome = launcher.turn(plan)
        assert not outcome.failed
        for req in running.values():
            told[req.key.rid].append((req.input_logprobs, req.last_logprobs))
        for req in outcome.finished:
            batcher.remove(req)
            assert req.kv is not None
            ledger.cache_finished_req(req.kv, req.ids)
            answers[req.key.rid] = req.ids, told[req.key.rid]
            del running[req.key.rid]
    launcher.close()
    stream.close()
    return answers


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_the_loop_of_a_node_serves_the_same_tokens(folder: Path, overlap: bool) -> None:
    expected = served(Engine(folder), overlap=overlap)
    graphed = Engine(folder, SHAPES)
    assert served(graphed, overlap=overlap) == expected
    assert graphed.num_replays > 20
    steps = [graph.num_replays > 0 for graph in graphed.graph_pool.graphs[-8:]]
    assert all(map(any, zip(steps[::2], steps[1::2], strict=True))), "several buckets"
    assert any(steps[::2]) and any(steps[1::2]), "with work that may be cut, and with such that is not"


@pytest.mark.parametrize("shape", [(512, 1), (512, 8), (7, 3), (1, 1)], ids=str)
def test_what_a_graph_is_tried_on_is_no_longer_than_a_sequence_can_be(shape: tuple[int, int]) -> None:
    batch = padding_batch(BlockShape(*shape), 8, PAGE_SIZE, LIMITS.context_length)
    assert BlockShape(*shape).holds(BlockShape.of(batch))
    assert batch.lengths_B.max() <= LIMITS.context_length
    assert batch.page_table_BP.shape[1] <= PAGES_A_ROW


def test_graphs_of_more_tokens_than_fit_into_the_context_are_captured(folder: Path) -> None:
    eager, graphed = Engine(folder), Engine.captured(folder, [BlockShape(512, 1)])
    check_same(eager, graphed, batch_of({0: (0, random_prompt(PAGE_SIZE * PAGES_A_ROW))}, {}))
    assert graphed.num_replays == 1


class TestShapes:
    def test_decode_steps_by_eights_and_extends_beside_them(self) -> None:
        shapes = graph_shapes(40, 552)
        assert [s.num_tokens for s in shapes if s.num_tokens == s.num_sequences] == [
            1,
            2,
            4,
            8,
            16,
            24,
            32,
            40,
        ]
        extends = [s for s in shapes if s.num_tokens != s.num_sequences]
        assert [s.num_tokens for s in extends] == [64, 128, 192, 256, 320, 384, 448, 512]
        assert {s.num_sequences for s in extends} == {40}
        assert list(shapes) == sorted(shapes)

    @pytest.mark.parametrize(
        ("needed", "expected"),
        [((200, 1), (200, 200)), ((150, 100), (152, 152)), ((257, 1), (320, 64))],
        ids=str,
    )
    def test_an_extend_runs_in_the_shape_of_a_decode_step_or_pays_for_64_logits(
        self, needed: tuple[int, int], expected: tuple[int, int]
    ) -> None:
        graphs = Graphs(FakeGraphPool(), graph_shapes(256, 1024))
        graphs.capture(lambda shape, may_cut: lambda: None)
        assert graphs.shape_for(BlockShape(*needed)) == BlockShape(*expected)
        assert graphs.shape_for(BlockShape(257, 65)) is None

    @pytest.mark.parametrize(
        ("max_tokens", "largest"), [(1, 16), (16, 16), (17, 32), (100, 128), (9999, 512)]
    )
    def test_no_extend_is_larger_than_any_forward_padded(self, max_tokens: int, largest: int) -> None:
        assert max(s.num_tokens for s in graph_shapes(1, max_tokens)) == largest

    @pytest.mark.parametrize("max_bs", [1, 2, 3, 5, 8, 13, 256])
    def test_the_largest_step_is_the_one_that_was_asked_for(self, max_bs: int) -> None:
        assert max(s.num_sequences for s in graph_shapes(max_bs, 1)) == max_bs

    @pytest.mark.parametrize(
        ("needed", "expected"),
        [
            *[((1, 1), (1, 1)), ((3, 3), (4, 4)), ((3, 1), (4, 4)), ((17, 2), (32, 8)), ((9, 5), (32, 8))],
            *[((33, 1), None), ((20, 9), None), ((9, 9), None)],
        ],
        ids=str,
    )
    def test_the_smallest_that_holds_a_forward(
        self, needed: tuple[int, int], expected: tuple[int, int] | None
    ) -> None:
        graphs = Graphs(FakeGraphPool(), SHAPES)
        assert graphs.shape_for(BlockShape(*needed)) is None, "none is captured"
        graphs.capture(lambda shape, may_cut: lambda: None)
        assert graphs.shape_for(BlockShape(*needed)) == (expected and BlockShape(*expected))

    def test_the_largest_is_captured_first_and_steps_also_for_work_that_is_not_cut(self) -> None:
        captured: list[tuple[BlockShape, bool]] = []

        def forward_of(shape: BlockShape, may_cut: bool) -> Callable[[], None]:
            captured.append((shape, may_cut))
            return lambda: None

        Graphs(FakeGraphPool(), SHAPES).capture(forward_of)
        assert captured == sorted(captured, reverse=True)
        assert {shape for shape, may_cut in captured if may_cut} == set(SHAPES)
        steps = {shape for shape in SHAPES if shape.num_tokens == shape.num_sequences}
        assert {shape for shape, may_cut in captured if not may_cut} == steps

    def test_two_captures_tell_what_all_will_take(self) -> None:
        pool = FakeGraphPool(nbytes_of=[100, 7])
        assert Graphs(pool, SHAPES).measure(lambda shape, may_cut: lambda: None) == 100 + 9 * 7
        pool = FakeGraphPool(nbytes_of=[100])
        assert Graphs(pool, SHAPES[-1:]).measure(lambda shape, may_cut: lambda: None) == 100


GPU = torch.device("cuda", 0)
CAPTURABLE = replace(torch_kernels(CPU), attention=BlockAttention())
"""Kernels of which nothing is run."""


@pytest.mark.parametrize(("max_bs", "largest"), [(3, 3), (NUM_ROWS, NUM_ROWS), (256, NUM_ROWS)])
def test_a_gpu_has_graphs_for_as_many_rows_as_are_wanted_and_can_be(max_bs: int, largest: int) -> None:
    graphs = choose_graphs(CAPTURABLE, max_bs, GPU, LIMITS, lambda device: FakeGraphPool())
    assert graphs is not None
    assert graphs.shapes == graph_shapes(largest, LIMITS.max_tokens)


def test_no_graphs_where_none_are_wanted_or_can_be(caplog: pytest.LogCaptureFixture) -> None:
    def no_pool(device: torch.device) -> FakeGraphPool:
        raise AssertionError("no graphs are made")

    caplog.set_level("INFO")
    assert choose_graphs(CAPTURABLE, 8, CPU, LIMITS, no_pool) is None
    assert choose_graphs(CAPTURABLE, None, GPU, LIMITS, no_pool) is None
    assert choose_graphs(torch_kernels(CPU), None, GPU, LIMITS, no_pool) is None
    assert not caplog.text, "the operator has disabled them"
    assert choose_graphs(torch_kernels(CPU), 8, GPU, LIMITS, no_pool) is None
    assert "no_cuda_graphs" in caplog.text and "--attention-backend torch allows none" in caplog.text
