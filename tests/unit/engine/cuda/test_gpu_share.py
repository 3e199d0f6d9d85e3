"""How nodes share the memory of a GPU: the whole start with a fake GPU's numbers."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from shared.config import CacheOptions, ScheduleOptions
from shared.engine.cuda.gpu_claims import GpuClaim, OtherNodes
from shared.engine.cuda.gpu_share import SETTLE_S, GpuShare
from shared.engine.engine_shape import MIN_PAGES, EngineShape
from shared.errors import ConfigError
from shared.scheduling.prefill_adder import tokens_beside
from tests.token_engine import token_model_config
from tests.unit.engine.cuda.fake_gpu import FakeGpu, FakeMemory, FakeModel

MIB = 1 << 20
PER_TOKEN = 4096
SHAPE = EngineShape(
    name="tiny",
    model=token_model_config(vocab_size=131072, max_position_embeddings=1 << 20),
    dtype=torch.float32,
    device=torch.device("cuda", 0),
    cache=CacheOptions(page_size=16),
    schedule=ScheduleOptions(max_running_requests=8),
    context_length=1 << 20,
    decodes=True,
)
ACTIVATIONS = 512 * PER_TOKEN
PAGE = SHAPE.page_nbytes


class FakeTime:
    """A clock that only sleeping moves; `at` has what happens then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: list[tuple[float, Callable[[], object]]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for entry in [entry for entry in self.at if entry[0] <= self.now]:
            self.at.remove(entry)
            entry[1]()


@dataclass
class Node:
    share: GpuShare
    model: FakeModel

    def start(self) -> int:
        """All steps of build_engine. Returns the pages of the pool."""
        with self.share.alone():
            self.share.await_room()
            self.model.load()
            self.share.measure(self.model.bind)
            num_pages = self.share.num_pages()
            self.share.warm_up(self.model.bind(num_pages))
        return num_pages

    @property
    def nbytes(self) -> int:
        memory = self.model.memory
        return memory.gpu.taken[memory.process]


class Host:
    """A machine with one GPU."""

    def __init__(self, folder: Path, total: int = 100 * MIB) -> None:
        self.folder = folder
        self.gpu = FakeGpu(total)
        self.time = FakeTime()
        self.progress: list[str] = []

    def node(self, shape: EngineShape = SHAPE, context: int = MIB, name: str = "") -> Node:
        memory = FakeMemory(self.gpu, name or f"node {len(self.gpu.taken)}")
        self.gpu.taken[memory.process] = 0
        share = GpuShare(
            shape,
            memory,
            GpuClaim(self.folder),
            lambda what, fraction: self.progress.append(what),
            self.time.clock,
            self.time.sleep,
        )
        return Node(share, FakeModel(shape, memory, PER_TOKEN, context))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def with_cache(**options: object) -> EngineShape:
    return replace(SHAPE, cache=replace(SHAPE.cache, **options))  # type: ignore[arg-type]


def test_one_node_takes_nine_tenths_in_all(host: Host) -> None:
    node = host.node()
    num_pages = node.start()
    assert 90 * MIB - 2 * PAGE < node.nbytes <= 90 * MIB
    assert num_pages == (90 * MIB - SHAPE.weights_nbytes - ACTIVATIONS - MIB) // PAGE - 1
    assert node.model.bound == [4, num_pages]
    assert node.share.memory_mib["activations_mib"] == 2
    assert node.share.memory_mib["other_mib"] == 1
    assert host.progress == ["measuring memory", "warming up", "testing"]


@pytest.mark.parametrize(("chunk", "beside"), [(8, 4), (32, 25)])
def test_a_chunk_beside_a_decode_step_is_measured_where_there_are_any(
    host: Host, chunk: int, beside: int
) -> None:
    """It has what the step leaves of a chunk, at least half: a small one and a step are larger than either alone."""
    schedule = replace(SHAPE.schedule, chunked_prefill_size=chunk)
    for mixed in (False, True):
        node = host.node(replace(SHAPE, schedule=replace(schedule, enable_mixed_chunk=mixed)))
        node.share.measure(node.model.bind)
        sizes = [(int(batch.lengths_B.sum()), batch.num_decodes) for batch in node.model.forwards]
        assert sizes == [(chunk, 0), (8, 8), (beside + 7, 7)][: 2 + mixed]


@pytest.mark.parametrize("decodes", [True, False])
def test_the_largest_forwards_are_measured_with_everything(host: Host, decodes: bool) -> None:
    shape = replace(SHAPE, decodes=decodes)
    node = host.node(shape)
    node.share.measure(node.model.bind)
    extend, *steps = node.model.forwards
    assert int(extend.lengths_B.sum()) == shape.max_extend_tokens
    assert [(step.num_decodes, len(step.rows_B)) for step in steps] == [(8, 8)] * decodes
    for batch in (extend, *steps):
        asked = batch.sampling
        assert None not in (asked.draws, asked.penalties, asked.biases, asked.masked, asked.logprobs)
    assert shape.forward_limits.max_tokens == shape.max_extend_tokens + 8, "a chunk beside a decode step"


def test_a_chunk_of_several_whole_prompts_is_measured_with_all_of_them(host: Host) -> None:
    """512 tokens of prompts that have 200 at most: the first two fill the context, and each other row has some."""
    schedule = replace(SHAPE.schedule, enable_mixed_chunk=True)
    node = host.node(replace(SHAPE, schedule=schedule, context_length=200))
    node.share.measure(node.model.bind)
    extend, _, mixed = node.model.forwards
    assert extend.lengths_B.tolist() == [200, 200, 107, 1, 1, 1, 1, 1]
    num_tokens = tokens_beside(5, 512)
    assert num_tokens > 400, "three prompts are needed"
    prompts = [length for length in mixed.lengths_B.tolist() if length > 1]
    assert (prompts, mixed.num_decodes) == ([200, 200, num_tokens - 400], 5)


def test_a_small_chunk_is_measured_at_the_end_of_the_context(host: Host) -> None:
    """There its attention reads the most KV. Rows for which the chunk has no token are left out."""
    schedule = replace(SHAPE.schedule, chunked_prefill_size=4, enable_mixed_chunk=True)
    node = host.node(replace(SHAPE, schedule=schedule, context_length=200))
    node.share.measure(node.model.bind)
    extend, _, mixed = node.model.forwards
    assert (extend.starts_B.tolist(), extend.lengths_B.tolist()) == ([199, 0, 0, 0], [1] * 4)
    num_tokens = tokens_beside(7, 4)
    assert (mixed.starts_B[0], mixed.lengths_B[0]) == (200 - num_tokens, num_tokens)


def test_a_chunk_larger_than_all_rows_is_measured_with_every_row_full(host: Host) -> None:
    schedule = replace(SHAPE.schedule, enable_mixed_chunk=True)
    node = host.node(replace(SHAPE, schedule=schedule, context_length=40))
    node.share.measure(node.model.bind)
    extend, _, mixed = node.model.forwards
    for batch in (extend, mixed):
        assert (batch.lengths_B.tolist(), batch.num_decodes) == ([40] * 8, 0)


def test_what_the_process_has_taken_before_is_no_part_of_what_cuda_takes(host: Host) -> None:
    """A second engine of one process, as in tests."""
    node = host.node()
    node.model.memory.alloc(5 * MIB)
    node.start()
    assert node.share.memory_mib["other_mib"] == 1


def test_memory_for_links_is_left_free_within_the_share(host: Host) -> None:
    node = host.node(replace(SHAPE, links_nbytes=20 * MIB))
    node.start()
    assert 70 * MIB - 2 * PAGE < node.nbytes <= 70 * MIB
    assert node.share.memory_mib["links_mib"] == 20
    with pytest.raises(ConfigError, match=r"links 0\.09 GiB"):
        host.node(replace(SHAPE, links_nbytes=90 * MIB))


def test_graphs_are_measured_before_the_pool_is_sized(host: Host) -> None:
    node = host.node()
    node.model.graphs = 20 * MIB
    node.start()
    assert 90 * MIB - 2 * PAGE < node.nbytes <= 90 * MIB
    assert node.share.memory_mib["graphs_mib"] == 20
    assert node.share.memory_mib["kv_mib"] < 70


def test_no_more_pages_than_all_requests_can_use(host: Host) -> None:
    assert host.node(replace(SHAPE, context_length=160)).start() == 8 * 10


def test_a_context_of_less_than_a_page_has_two_pages(host: Host) -> None:
    tiny = replace(
        SHAPE, context_length=8, schedule=replace(SHAPE.schedule, max_running_requests=1), cache=SHAPE.cache
    )
    assert host.node(tiny).start() == MIN_PAGES


def test_nodes_that_start_at_the_same_moment_share(host: Host) -> None:
    first, second = host.node(), host.node()
    pages = first.start(), second.start()
    assert pages[0] == pages[1]
    assert first.nbytes <= 45 * MIB and second.nbytes <= 45 * MIB
    assert first.nbytes > 44 * MIB


def test_a_node_that_comes_while_another_measures_gets_its_share(host: Host) -> None:
    first = host.node()
    late: list[Node] = []
    host.time.at.append((SETTLE_S / 2, lambda: late.append(host.node())))
    host.time.at.append((SETTLE_S / 2, lambda: None))
    first.start()
    late[0].start()
    assert first.nbytes <= 45 * MIB
    assert late[0].nbytes > 44 * MIB


def test_a_node_waits_while_another_loads(host: Host) -> None:
    first, second = host.node(), host.node()
    loading = first.share.alone()
    loading.__enter__()
    host.time.at.append((3.0, lambda: loading.__exit__(None, None, None)))
    with second.share.alone():
        assert host.time.now == pytest.approx(3.0, abs=0.3)
    assert {*host.progress} == {f"waiting for process {os.getpid()}, which loads on the GPU"}


def test_a_process_that_has_not_told_its_id_is_not_called_process_0(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton")
    node = host.node()
    with open(host.folder / "loading") as loading:
        fcntl.flock(loading, fcntl.LOCK_EX)
        host.time.at.append((3.0, lambda: fcntl.flock(loading, fcntl.LOCK_UN)))
        with node.share.alone():
            assert {*host.progress} == {"waiting for another process, which loads on the GPU"}
    assert "waiting_for_gpu" not in caplog.text, "the log names a process or none"


def test_given_fractions_are_kept_in_any_order(host: Host) -> None:
    second = host.node(with_cache(mem_fraction_static=0.3))
    rest = host.node()
    rest.start()
    second.start()
    assert 59 * MIB < rest.nbytes <= 60 * MIB
    assert 29 * MIB < second.nbytes <= 30 * MIB


@pytest.mark.parametrize(
    ("options", "waits"),
    [({}, True), ({"mem_fraction_static": 0.3}, False), ({"max_total_tokens": 64}, False)],
    ids=["by itself", "fraction", "tokens"],
)
def test_only_a_share_that_depends_on_other_nodes_waits_for_them(
    host: Host, options: dict[str, float], waits: bool
) -> None:
    host.gpu.taken["stranger"] = MIB
    host.node(with_cache(**options)).start()
    assert host.time.now == (SETTLE_S if waits else 0)


def test_a_node_that_comes_too_late_is_refused_with_the_numbers(host: Host) -> None:
    host.node().start()
    late = host.node(with_cache(gpu_memory_timeout_s=7.0))
    with pytest.raises(ConfigError, match=r"0\.10 GiB .*0\.09 GiB .*7 s"):
        late.start()
    assert late.model.bound == [], "it has loaded nothing"


def test_a_replacement_waits_for_the_memory_of_its_predecessor(host: Host) -> None:
    first, second = host.node(), host.node()
    first.start()
    pages = second.start()
    second.share.close()  # it was killed, and the driver still takes its context down
    replacement = host.node()
    host.time.at.append((host.time.now + 20.0, lambda: host.gpu.taken.pop("node 1")))
    assert replacement.start() == pages
    assert "waiting for GPU memory" in host.progress


def test_a_node_beside_a_process_that_keeps_its_memory_takes_what_is_left(host: Host) -> None:
    host.gpu.taken["stranger"] = 80 * MIB
    node = host.node()
    began = host.time.now
    assert node.start() > 0
    assert 19 * MIB < node.nbytes <= 20 * MIB
    assert 60 <= host.time.now - began < 61, "the process might have been a dying one"


def test_a_node_gives_up_where_the_model_does_not_fit_into_what_is_free(host: Host) -> None:
    host.gpu.taken["stranger"] = 80 * MIB
    began = host.time.now
    with pytest.raises(ConfigError, match=r"0\.03 GiB .* 0\.02 GiB .*0\.10.*60"):
        host.node(with_cache(max_total_tokens=30 * MIB // PAGE * 16)).start()
    assert 60 <= host.time.now - began < 61


def test_a_dead_node_counts_no_more(host: Host) -> None:
    (host.folder / "node-1-dead").write_text(f"{80 * MIB:20}")
    claim = GpuClaim(host.folder)
    assert claim.others() == OtherNodes(0, 0)
    assert not (host.folder / "node-1-dead").exists()
    other = GpuClaim(host.folder)
    other.take(5)
    assert claim.others() == OtherNodes(0, 5)
    other.close()
    assert claim.others() == OtherNodes(0, 0)
    claim.close()


def test_a_folder_that_is_not_of_this_user_alone_is_refused(tmp_path: Path) -> None:
    own, folder = tmp_path / "baton", tmp_path / "baton" / "uuid"
    GpuClaim(folder).close()
    assert own.stat().st_mode & 0o777 == 0o700
    for shared in (own, folder):
        shared.chmod(0o777)
        with pytest.raises(ConfigError, match="TMPDIR"):
            GpuClaim(folder)
        shared.chmod(0o700)
    linked = tmp_path / "linked"
    linked.symlink_to(own)
    with pytest.raises(ConfigError, match="another user"):
        GpuClaim(linked / "uuid")
    with pytest.raises(ConfigError, match="File exists"):
        GpuClaim(next(folder.glob("loading")) / "uuid")


def test_weights_that_never_fit_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    host = Host(tmp_path, total=SHAPE.weights_nbytes)
    with pytest.raises(ConfigError, match=r"cuda:0: .*weights 0\.00 GiB"):
        host.node()
    assert host.time.now == 0


def test_activations_that_do_not_fit_are_refused_with_every_number(tmp_path: Path) -> None:
    host = Host(tmp_path, total=SHAPE.weights_nbytes * 2)
    shape = with_cache(mem_fraction_static=0.6)
    node = host.node(shape, context=MIB // 4)
    node.model.per_token = SHAPE.weights_nbytes // 2 // 512
    with pytest.raises(ConfigError, match=r"\(weights .*, activations .*, other .*, the KV pool "):
        node.start()


def test_a_forward_that_does_not_fit_is_refused_with_its_size(host: Host) -> None:
    node = host.node()
    node.model.per_token = MIB
    with pytest.raises(ConfigError, match=r"512 .*8 .*--chunked-prefill-size"):
        node.start()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["torch", "triton"],
)
@pytest.mark.parametrize(
    ("step", "what"),
    [
        ("measure_graphs", "CUDA graphs"),
        ("forward 0", "a forward of 512 tokens"),
        ("capture_graphs", "CUDA graphs"),
        ("the last forward", "the self test"),
    ],
)
def test_memory_that_runs_out_anywhere_is_refused_with_the_numbers(
    host: Host, tmp_path: Path, step: str, what: str, error: Exception
) -> None:
    if step == "the last forward":
        sound = Host(tmp_path / "sound" / "gpu").node()
        sound.start()
        step = f"forward {len(sound.model.forwards) - 1}"
    node = host.node()
    node.model.fails_at, node.model.error = step, error
    with pytest.raises(ConfigError, match=rf"tiny does not fit .*: weights .*{what}.* not fit beside"):
        node.start()


def test_another_error_of_a_start_stays_what_it_is(host: Host) -> None:
    node = host.node()
    node.model.fails_at, node.model.error = "capture_graphs", RuntimeError("an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        node.start()


def test_max_total_tokens_says_how_much_a_node_takes(host: Host) -> None:
    nodes = [host.node(with_cache(max_total_tokens=1600)) for _ in range(2)]
    assert [node.start() for node in nodes] == [100, 100]
    with pytest.raises(ConfigError, match=r"tiny does not fit .* and may take"):
        host.node(with_cache(max_total_tokens=100 * MIB // PAGE * 16 - 16))


def test_memory_that_others_took_meanwhile_makes_the_pool_smaller(host: Host) -> None:
    node = host.node()
    host.time.at.append((0.0, lambda: host.gpu.taken.update(stranger=40 * MIB)))
    node.start()
    assert 59 * MIB - 2 * PAGE < node.nbytes <= 60 * MIB


def test_pages_are_moved_in_each_direction_before_a_peer_waits_for_it(host: Host) -> None:
    """Of the first and of the last layer, which may be in pools of their own."""
    node = host.node()
    node.start()
    num_rows = 2 * SHAPE.model.num_layers
    assert node.model.mover.gathered == [range(2), range(num_rows - 2, num_rows)]
    assert node.model.mover.scattered == node.model.mover.gathered
