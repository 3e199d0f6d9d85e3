"""A prefill node and a decode node that share a FakeGpu, over the real schedulers, launcher, ledger and transfer.

Threads of the host take turns at waits: while one waits for the device, a scheduler, or the threads that serve the
network and the links, may go on. `run` returns what went wrong: nothing, unless there is a race.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions, TransferOptions
from shared.engine.cuda.forward_stream import CudaForwardStream
from shared.engine.input_block import InputBlock
from shared.engine.model_worker_batch import uniforms
from shared.kvcache import page_digest
from shared.kvcache.allocator import PageAllocator
from shared.kvcache.audit import audit, audit_idle
from shared.kvcache.radix_cache import RadixCache
from shared.kvtransfer.link import LinkFactory
from shared.kvtransfer.transports.choice import Transports
from shared.protocol.messages import ReqKey
from shared.protocol.sampling_params import SamplingParams
from shared.protocol.transfer_messages import Grant
from tests.cluster import Cluster, Node
from tests.fake_link import FakeLinkFactory
from tests.fake_network import FakeNetwork, Faults
from tests.sim.streams.device import FakeGpu, Schedule
from tests.sim.streams.engine import (
    MakeStream,
    NewInputs,
    NewMover,
    drawn_token,
    streams_engine,
    triton_mover,
)
from tests.sim.streams.links import DeviceMemory, GpuLinkRunner
from tests.sim.streams.tensors import DeviceTensor, FakeTorch
from tests.token_engine import next_token

PAGE_SIZE = 4
CONTEXT_LENGTH = 96
STEP_S = 0.002
MAX_STEPS = 4000
HAPPENINGS = ("no memory", "cancel", "abort the link", "disconnect", "time out")


SLOT_NBYTES = 4 * 2 * PAGE_SIZE * 8
OPTIONS = TransferOptions(slot_nbytes=SLOT_NBYTES, num_slots=2, op_timeout_s=0.2)


@dataclass(frozen=True)
class Happening:
    """What befalls the fleet before one of its steps."""

    step: int
    kind: str
    choice: int = 0


@dataclass(frozen=True)
class Scenario:
    """What hypothesis draws."""

    schedule: Schedule
    num_reqs: int = 3
    overlap: bool = True
    tokens: int = 64
    """Size of the decode node's pool."""
    retract_every: int = 0
    retract_policy: str = "host"
    happenings: tuple[Happening, ...] = ()


@dataclass(frozen=True)
class Parts:
    """What the engines and links are made of. A defect is planted by a double of one of them."""

    make_stream: MakeStream = CudaForwardStream
    new_allocator: Callable[[int], PageAllocator] = PageAllocator
    new_inputs: NewInputs = InputBlock
    new_mover: NewMover = triton_mover
    links: Callable[[FakeNetwork, str, TransferOptions, DeviceMemory], LinkFactory] = FakeLinkFactory


def run(scenario: Scenario, parts: Parts = Parts()) -> list[str]:
    """What went wrong."""
    gpu = FakeGpu(scenario.schedule)
    page_digest._keys.cache_clear()  # they are tensors of the last run's device
    with (
        torch.inference_mode(),
        FakeTorch(gpu) as torch_mode,
        _Warnings() as warnings,
        _no_garbage_collection(),
    ):
        try:
            ScenarioFleet(scenario, parts, gpu, torch_mode).run()
        except Exception as error:  # of a scheduler, which ends its node
            gpu.found(f"{type(error).__name__}: {error}")
        finally:
            gpu.close()
    return [*gpu.races, *warnings.of_corruption]


class ScenarioFleet:
    """The nodes, their requests, and what happens to them."""

    def __init__(self, scenario: Scenario, parts: Parts, gpu: FakeGpu, torch_mode: FakeTorch) -> None:
        self._scenario = scenario
        self._gpu = gpu
        self._parts = parts
        self._random = random.Random(scenario.schedule.seed)
        self._at_work: list[object] = []
        """The threads of the host that wait for the device, the newest last."""
        self._wanted: dict[ReqKey, list[int]] = {}
        self._cluster = Cluster(
            1,
            1,
            partial(
                streams_engine,
                gpu,
                torch_mode,
                make_stream=parts.make_stream,
                new_allocator=parts.new_allocator,
                new_inputs=parts.new_inputs,
                new_mover=parts.new_mover,
            ),
            _config(scenario, "recompute", 256, 0),
            decode_config=_config(scenario, scenario.retract_policy, scenario.tokens, scenario.retract_every),
            seed=scenario.schedule.seed,
            faults=Faults(outlive_timeout=True),
            options=OPTIONS,
            make_transports=self._transports,
        )
        gpu.on_wait = self._let_others_work

    def run(self) -> None:
        """Serve every request, and check what they got and what they left."""
        cluster, scenario = self._cluster, self._scenario
        happenings = {happening.step: happening for happening in scenario.happenings}
        for step in range(MAX_STEPS):
            if step % 3 == 0 and step // 3 < scenario.num_reqs:
                self._submit(step // 3)
            if step in happenings:
                self._befall(happenings[step])
            if len(self._wanted) == scenario.num_reqs and step > max(happenings, default=0) and self._is_idle:
                break
            self._step()
        else:
            raise AssertionError(f"not idle after {MAX_STEPS} steps: {cluster.describe()}")
        self._gpu.synchronize()
        self._check()
        self._gpu.on_wait = lambda: None
        cluster.close()

    # --------------------------------------------------------------------------------- threads of the host
    def _step(self) -> None:
        for node in self._cluster.live:
            self._work(node)
        self._work(self._cluster.network, STEP_S)

    def _work(self, worker: Node | FakeNetwork, seconds: float = 0.0) -> None:
        """One turn of a thread, unless it is in the middle of one."""
        if worker in self._at_work:
            return
        self._at_work.append(worker)
        try:
            if isinstance(worker, Node):
                if worker.alive:
                    worker.scheduler.step()
                    audit(worker.engine.ledger)
            else:
                worker.advance(seconds)
        finally:
            self._at_work.pop()

    def _let_others_work(self) -> None:
        self._work(self._random.choice([*self._cluster.live, self._cluster.network]), STEP_S / 10)

    def _transports(self, network: FakeNetwork, party: str, options: TransferOptions) -> Transports:
        links = self._parts.links(network, party, options, DeviceMemory(self._gpu))
        runner = GpuLinkRunner(network, party, self._gpu)
        return Transports({"fake": links}, runner, slot_nbytes=SLOT_NBYTES)

    # ------------------------------------------------------------------------------------------- requests
    def _submit(self, number: int) -> None:
        rng = random.Random(number % 3)
        shared, own = [rng.randrange(8, 900) for _ in range(9)], random.Random(100 + number)
        ids = [*shared, *(own.randrange(8, 900) for _ in range(3 + 5 * (number % 3)))]
        length = 6 + 7 * (number % 2)
        params = SamplingParams(
            max_new_tokens=length, temperature=float(number % 2), seed=number, ignore_eos=True
        )
        key = self._cluster.router.submit(f"r{number}", ids, params, "p0", "d0")
        self._wanted[key] = _reference_tokens(ids, params)

    def _befall(self, happening: Happening) -> None:
        cluster = self._cluster
        network, choice = cluster.network, happening.choice
        match happening.kind:
            case "no memory":
                self._gpu.num_allocations_left = choice
            case "cancel":
                live = [key for key in self._wanted if not cluster.router.answers[key].ended]
                if live:
                    cluster.router.give_up(live[choice % len(live)], "the client went away")
            case "abort the link":
                node = cluster.nodes[("p0", "d0")[choice % 2]]
                for worker in node.side._links:
                    worker.abort_ops()
            case "disconnect":
                network.disconnect("p0", "d0")
                network.connect("p0", "d0")
            case "time out":
                seconds = 1.5 * OPTIONS.op_timeout_s
                if choice % 2:  # receives do
                    network.hold(Grant)
                    network.call_later(seconds, lambda: network.release(Grant))
                else:  # sends do, if there are any
                    network.stop("d0")
                    network.call_later(seconds, lambda: network.resume("d0"))

    # ---------------------------------------------------------------------------------------------- checks
    @property
    def _is_idle(self) -> bool:
        return all(answer.ended for answer in self._cluster.router.answers.values()) and all(
            not node.scheduler.reqs
            and node.scheduler._launcher.in_flight is None
            and all(worker.finished or worker.live for worker in node.side._links)
            for node in self._cluster.live
        )

    def _check(self) -> None:
        excused = bool(self._scenario.happenings)
        for key, tokens in self._wanted.items():
            answer = self._cluster.router.answers[key]
            if answer.failures:
                assert excused, f"{key} failed, and nothing had happened: {answer.failures}"
                tokens = tokens[: len(answer.token_ids)]
            assert answer.token_ids == tokens, f"{key}: {answer.token_ids} instead of {tokens}"
        for node in self._cluster.live:
            audit_idle(node.engine.ledger)
            _check_cached_pages(node)


def _reference_tokens(ids: list[int], params: SamplingParams) -> list[int]:
    """What any order of streams must produce. Every second request samples, which takes parameters to the device."""
    ids, num_input_ids = list(ids), len(ids)
    for position in range(params.max_new_tokens):
        drawn = next_token(ids), params.temperature, float(uniforms([params.seed], [position])[0])
        ids.append(int(drawn_token(*map(torch.tensor, drawn))))
    return ids[num_input_ids:]


def _check_cached_pages(node: Node) -> None:
    """Each page of the RadixCache holds the tokens that it is cached for."""
    buffer = node.engine.pool.buffer_LSNHPD
    assert isinstance(buffer, DeviceTensor)
    k_NP, v_NP = buffer.backing[0, 0, :, 0, :, 0], buffer.backing[0, 1, :, 0, :, 0]
    for page, ids in _cached_pages(node.engine.ledger.radix_cache):
        got, complement = k_NP[page].tolist(), [~token for token in v_NP[page].tolist()]
        assert got == complement == ids, (
            f"{node.name}: cached page {page} holds {got}, {complement}, not {ids}"
        )


def _cached_pages(cache: RadixCache) -> Iterator[tuple[int, list[int]]]:
    nodes = [cache._root]
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        for key, page in zip(node.keys, node.pages, strict=True):
            yield page, [token for token in key if isinstance(token, int)]


def _config(scenario: Scenario, policy: str, tokens: int, retract_every: int) -> NodeConfig:
    return NodeConfig(
        cache=CacheOptions(page_size=PAGE_SIZE, max_total_tokens=tokens, host_kv_tokens=CONTEXT_LENGTH),
        schedule=ScheduleOptions(
            chunked_prefill_size=8,
            max_running_requests=4,
            num_reserved_decode_tokens=4,
            disable_overlap_schedule=not scenario.overlap,
            retract_policy=policy,
            retract_every=retract_every,
        ),
        model=ModelOptions(context_length=CONTEXT_LENGTH),
    )


class _Warnings(logging.Handler):
    """Reads the log: a chunk that does not have its digest does not end a request here, so nothing else shows it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.of_corruption: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line.startswith("corrupt_pages"):
            self.of_corruption.append(line)

    def __enter__(self) -> _Warnings:
        logging.getLogger("baton").addHandler(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger("baton").removeHandler(self)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Memory of the device is freed when its last reference goes, so the same scenario runs the same way again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
