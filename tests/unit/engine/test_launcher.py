"""One turn of the launcher: what is queued before what, with grammars and without."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from shared.config import CacheOptions, NodeConfig, ScheduleOptions
from shared.engine.launcher import KVCopies, Launcher
from shared.engine.loop_parts import new_launcher
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.sampling_inputs import VocabMask
from shared.grammar.state import GrammarState
from shared.kvcache.allocator import PageCopy
from shared.protocol.messages import Finish, ReqKey, Work
from shared.protocol.sampling_params import Grammar, SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.commit import Outcome, Sampled
from shared.scheduling.plan import KVCopy, Plan
from shared.scheduling.req import Req
from shared.timeline import Role, Timeline
from tests.token_engine import EOS, VOCAB_SIZE, token_engine
from tests.token_grammar import CostlyCompiled, CpuTime, TokenCompiled
from tests.unit.engine.late_stream import LateStream

CONFIG = NodeConfig(
    cache=CacheOptions(page_size=4, max_total_tokens=400),
    schedule=ScheduleOptions(max_running_requests=4),
)


@dataclass
class Result:
    stream: SteppedStream
    number: int
    tokens: list[int]

    def wait(self) -> Sampled:
        self.stream.calls.append(f"wait {self.number}")
        if self.number == self.stream.fails_at:
            raise RuntimeError(f"forward {self.number}")
        return Sampled(self.tokens)


@dataclass
class SteppedStream:
    """Notes every call. Samples the lowest token that is allowed, or 10."""

    calls: list[str] = field(default_factory=list)
    fails_at: int | None = None
    refuses_at: int | None = None
    num_submitted: int = 0

    def submit(self, batch: ModelWorkerBatch) -> tuple[int, int]:
        self.num_submitted += 1
        self.calls.append(f"submit {self.num_submitted}")
        if self.num_submitted == self.refuses_at:
            raise RuntimeError("refused")
        return self.num_submitted, len(batch.sampled_B)

    def sample(self, forwarded: tuple[int, int], vocab_mask: VocabMask[np.ndarray] | None) -> Result:
        number, num_samples = forwarded
        tokens = [10] * num_samples
        if vocab_mask is not None:
            bits = np.unpackbits(vocab_mask.allowed_GW.view(np.uint8), axis=1, bitorder="little")
            for entry, row in zip(vocab_mask.entries_G, bits, strict=True):
                tokens[entry] = int(row.argmax())
        self.calls.append(f"sample {number}" + (" masked" if vocab_mask is not None else ""))
        return Result(self, number, tokens)

    def fence(self) -> Passed:
        return Passed()

    def close(self) -> None: ...


class Passed:
    def wait(self) -> None: ...


class LauncherRig:
    def __init__(self, *, overlap: bool, stream: SteppedStream | LateStream | None = None) -> None:
        self.engine = token_engine(CONFIG)
        self.stream = stream or SteppedStream()
        self.allocator = self.engine.ledger.allocator
        self.launcher = Launcher(
            self.stream,  # type: ignore[arg-type]
            self.engine.ledger,
            self.engine.eos_token_ids,
            overlap=overlap,
            debug_checks=True,
        )
        self.batcher = Batcher(self.engine.ledger, CONFIG.schedule)
        self.cpu = CpuTime()

    def add(
        self,
        rid: str,
        grammar: TokenCompiled | None,
        max_new_tokens: int = 20,
    ) -> Req:
        asked = Grammar("ebnf", "x") if grammar else None
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, grammar=asked)
        req = Req(ReqKey("router", rid), Work((20, 21, 22), params), Timeline(Role.DECODE), max_new_tokens)
        req.grammar = GrammarState(grammar, cpu_clock=self.cpu) if grammar else None
        self.batcher.add(req)
        return req

    def turn(self) -> Outcome:
        outcome = self.launcher.turn(self.batcher.plan())
        for req in [*outcome.finished, *outcome.failed]:
            self.batcher.remove(req)
        return outcome


def test_without_grammars_a_forward_samples_at_once() -> None:
    world = LauncherRig(overlap=True)
    world.add("a", None)
    for _ in range(3):
        world.turn()
    assert world.stream.calls == [
        "submit 1", "sample 1", "submit 2", "sample 2", "wait 1", "submit 3", "sample 3", "wait 2",
    ]  # fmt: skip


def test_with_a_grammar_the_forward_is_ahead_and_its_sampling_behind_the_commit() -> None:
    world = LauncherRig(overlap=True)
    world.add("a", TokenCompiled(3, 9))
    world.add("b", None)
    for _ in range(3):
        world.turn()
    assert world.stream.calls == [
        "submit 1", "sample 1 masked",
        "submit 2", "wait 1", "sample 2 masked",
        "submit 3", "wait 2", "sample 3 masked",
    ]  # fmt: skip


@pytest.mark.parametrize("disabled", [False, True])
def test_the_options_of_the_node_reach_the_launcher(disabled: bool) -> None:
    """--debug-checks finds a step that was left out; --disable-overlap-schedule leaves no forward in flight."""
    for checked in (False, True):
        engine = token_engine(CONFIG)
        options = ScheduleOptions(disable_overlap_schedule=disabled, debug_checks=checked)
        launcher, batcher = new_launcher(engine, options), Batcher(engine.ledger, options)
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        batcher.add(Req(ReqKey("router", "a"), Work((1, 2, 3), params), Timeline(Role.DECODE), 20))
        for _ in range(2):
            launcher.turn(batcher.plan())
        assert (launcher.in_flight is None) is disabled
        batcher.plan()  # planned, but never launched
        with pytest.raises(AssertionError, match="router/a") if checked else nullcontext():
            launcher.turn(batcher.plan())


def test_without_overlap_nothing_is_in_flight() -> None:
    world = LauncherRig(overlap=False)
    world.add("a", TokenCompiled(3, 9))
    for _ in range(2):
        world.turn()
    assert world.stream.calls == [
        "submit 1", "sample 1 masked", "wait 1", "submit 2", "sample 2 masked", "wait 2",
    ]  # fmt: skip


@pytest.mark.parametrize("overlap", [True, False])
def test_a_finished_grammar_stops_even_with_ignore_eos(overlap: bool) -> None:
    world = LauncherRig(overlap=overlap)
    req = world.add("a", TokenCompiled(3, 2))
    finished: list[Req] = []
    while not finished:
        finished = world.turn().finished
    assert req.ids[3:] == [0, 0, EOS]
    assert req.finish is not None
    assert (req.finish.type, req.finish.matched) == ("stop", EOS)
    world.turn()  # what was launched before its end was seen is dropped
    assert req.ids[3:] == [0, 0, EOS]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_grammar_without_a_next_token_ends_its_request_alone(overlap: bool) -> None:
    class Stuck(TokenCompiled):
        def __init__(self) -> None:
            super().__init__(VOCAB_SIZE * 1000, 9)  # after 10, no token makes the sum divisible

    world = LauncherRig(overlap=overlap)
    req, other = world.add("a", Stuck()), world.add("b", None)
    assert req.grammar is not None
    req.grammar._matcher.accepted.append(1)  # type: ignore[attr-defined]
    stuck: list[Req] = []
    while not stuck:
        stuck = list(world.turn().failed)
    assert stuck == [req]
    assert req.output_len == 0
    assert other.output_len > 0


def test_after_a_failed_forward_the_next_one_is_sampled_without_its_requests() -> None:
    world = LauncherRig(overlap=True, stream=SteppedStream(fails_at=2))
    req = world.add("a", TokenCompiled(3, 9))
    failed: list[Req] = []
    while not failed:
        failed = list(world.turn().failed)
    assert failed == [req]
    assert world.stream.calls[-3:] == ["submit 3", "wait 2", "sample 3"]


def test_a_failed_forward_fails_no_request_that_had_ended_before() -> None:
    world = LauncherRig(overlap=True, stream=SteppedStream(fails_at=2))
    aborted, other = world.add("a", None), world.add("b", None)
    for _ in range(2):
        world.turn()
    world.batcher.remove(aborted)
    aborted.end(Finish("abort"))
    assert list(world.turn().failed) == [other]


def test_a_forward_that_was_not_launched_does_not_sample() -> None:
    world = LauncherRig(overlap=True, stream=SteppedStream(refuses_at=2))
    req = world.add("a", TokenCompiled(3, 9))
    world.turn()
    world.turn()
    assert list(world.turn().failed) == [req]
    assert "sample 2" not in " ".join(world.stream.calls)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("call", ["submit", "sample"])
def test_pages_of_a_launch_that_raises_go_to_no_arrival_while_its_kernels_run(
    call: str, overlap: bool
) -> None:
    """A GPU runs out of memory while the host is queueing: what was queued before still writes."""
    stream = LateStream(raising={call: torch.OutOfMemoryError("in the middle")})
    world = LauncherRig(overlap=overlap, stream=stream)
    req = world.add("a", None)
    failed: list[Req] = []
    while not failed:
        failed = list(world.turn().failed)
    assert failed == [req]
    assert req.kv is not None
    world.engine.ledger.cache_finished_req(req.kv, req.ids)
    arrivals = world.allocator.alloc_for_arrival(world.allocator.num_free_for_arrivals)
    assert arrivals is not None
    assert not stream.pages_in_use & {*arrivals}
    if not overlap:
        assert len(arrivals) == world.allocator.num_pages, "every page came back"


def test_pages_of_a_copy_that_raises_go_to_no_arrival_while_it_runs() -> None:
    stream = LateStream(raising={"copy": torch.OutOfMemoryError("in the middle")})
    world = LauncherRig(overlap=True, stream=stream)
    req = world.add("a", None)
    copies = KVCopies(stream, world.engine.ledger)
    pages = world.allocator.alloc(3)
    assert pages is not None
    world.allocator.forward_launched()  # as retraction announces a copy
    copies.launch([KVCopy(req, 0, PageCopy(True, tuple(pages), (0, 1, 2)), 12)])
    world.allocator.free(pages)
    outcome = Outcome()
    copies.settle_latest(outcome)
    assert {failed: error.status for failed, error in outcome.failed.items()} == {req: 500}
    arrivals = world.allocator.alloc_for_arrival(world.allocator.num_pages)
    assert arrivals is not None
    assert not stream.pages_in_use & {*arrivals}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_copy_with_no_forward_behind_it_is_accounted_for_in_its_own_turn(overlap: bool) -> None:
    """An arrival waits for the pages of the copy, and no forward may ever come."""
    world = LauncherRig(overlap=overlap, stream=LateStream())
    req, pages = world.add("a", None), world.allocator.alloc(world.allocator.num_pages)
    assert pages is not None
    world.allocator.forward_launched()  # as retraction announces a copy
    copy = KVCopy(req, 0, PageCopy(True, tuple(pages), tuple(pages)), 4 * len(pages))
    world.allocator.free(pages)
    outcome = world.launcher.turn(Plan(copies=(copy,)))
    assert [settled for settled, _ in outcome.copied] == [copy]
    assert world.allocator.num_free_for_arrivals == world.allocator.num_pages


class IllegalAddress(torch.AcceleratorError):
    error_code = 700


class NoPinnedMemory(torch.AcceleratorError):
    error_code = 2


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("call", ["submit", "sample", "wait"])
def test_a_lost_device_ends_the_node_at_once(call: str, overlap: bool) -> None:
    lost = IllegalAddress("an illegal memory access was encountered")
    stream = LateStream(error_when_run=lost, raising={} if call == "wait" else {call: lost})
    world = LauncherRig(overlap=overlap, stream=stream)
    world.add("a", None)
    if call == "wait" and overlap:
        world.turn()  # the forward is in flight
    with pytest.raises(IllegalAddress):
        world.turn()


def test_an_error_of_the_host_that_hides_a_lost_device_ends_the_node_too() -> None:
    """cuBLAS raises a RuntimeError; what was queued behind the illegal address says the rest."""
    lost = IllegalAddress("an illegal memory access was encountered")
    stream = LateStream(
        error_when_run=lost, raising={"submit": RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")}
    )
    world = LauncherRig(overlap=False, stream=stream)
    world.add("a", None)
    with pytest.raises(IllegalAddress):
        world.turn()


def test_a_copy_that_loses_the_device_ends_the_node() -> None:
    stream = LateStream(error_when_run=IllegalAddress("an illegal memory access was encountered"))
    world = LauncherRig(overlap=True, stream=stream)
    copies = KVCopies(stream, world.engine.ledger)
    world.allocator.forward_launched()
    copies.launch([KVCopy(world.add("a", None), 0, PageCopy(True, (1,), (0,)), 4)])
    with pytest.raises(IllegalAddress):
        copies.settle_latest(Outcome())


def test_a_launch_of_triton_on_a_lost_device_ends_the_node() -> None:
    """Triton raises a RuntimeError for every error of the driver."""
    lost = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    world = LauncherRig(overlap=False, stream=LateStream(raising={"submit": lost}))
    world.add("a", None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        world.turn()


@pytest.mark.parametrize(
    "error", [NoPinnedMemory("out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")], ids=repr
)
def test_an_allocation_that_fails_ends_its_requests_alone(error: Exception) -> None:
    """Pinned memory that cannot be had comes as an error of CUDA, and leaves the device intact."""
    world = LauncherRig(overlap=False, stream=LateStream(raising={"submit": error}))
    req = world.add("a", None)
    assert list(world.turn().failed) == [req]
    world.add("b", None)
    assert not world.turn().failed


@pytest.mark.parametrize("overlap", [True, False])
def test_a_grammar_that_becomes_slow_ends_its_own_request_only(overlap: bool) -> None:
    world = LauncherRig(overlap=overlap)
    cpu = world.cpu
    slow = world.add("slow", CostlyCompiled(cpu, mask_s=lambda step: 0.001 * 2**step))
    other = world.add("other", TokenCompiled(3, 20))
    ended: list[Req] = []
    while other not in ended:
        outcome = world.turn()
        for req, error in outcome.failed.items():
            assert (req, error.param) == (slow, "ebnf")
            assert error.message.startswith("ebnf: following this grammar takes too long")
            req.end(Finish("abort"))  # as schedulers do
        ended += [*outcome.finished, *outcome.failed]
    assert ended == [slow, other]
    assert 0 < slow.output_len < 12
    assert other.output_len == 20
    assert cpu.seconds < 1
