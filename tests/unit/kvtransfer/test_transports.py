"""Which transport a pair uses, what it falls back to, and who is refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
import torch
from msgspec import Struct

from shared.config import TransferOptions
from shared.device_threads import DeviceThreads
from shared.errors import ConfigError, LinkError, PeerMismatch
from shared.kvtransfer.link import Link, LinkSpec, Op
from shared.kvtransfer.staging import Slot
from shared.kvtransfer.states import ReceiveFailed
from shared.kvtransfer.transports.choice import Transports, host_identity, links_nbytes, make_transports
from shared.kvtransfer.transports.cuda.cuda_ipc import CudaIpcLinkFactory
from shared.kvtransfer.transports.cuda.nccl import NcclLinkFactory
from shared.kvtransfer.transports.shm import ShmLinkFactory
from shared.protocol.messages import Ping
from shared.protocol.transfer_messages import LinkOpen, Place, StoreSet
from tests.chaos.corruption import FaultyLinkFactory
from tests.fake_cuda import FakeRuntime
from tests.fake_nccl import FakeNccl
from tests.unit.kvtransfer.link_pair import NCCL, LinkPair, key, real, transports
from tests.unit.kvtransfer.looks import num_slots_out, peer_states, transports_of

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.fixture
def new_pair() -> Iterator[Callable[[Transports, Transports], LinkPair]]:
    pairs: list[LinkPair] = []

    def new(p: Transports, d: Transports) -> LinkPair:
        pairs.append(LinkPair(real("auto"), p_transports=p, d_transports=d))
        return pairs[-1]

    yield new
    for pair in pairs:
        pair.close()


class Unbuildable(ShmLinkFactory):
    """As where a sandbox forbids what the probe allowed."""

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        raise LinkError("this sandbox passes no descriptors")


@pytest.mark.parametrize(
    ("p_backend", "d_backend", "carried_by"),
    [
        ("auto", "auto", "shm"),
        ("auto", "gloo", "gloo"),
        ("gloo", "auto", "gloo"),
        ("auto", "shm", "shm"),
        ("shm", "auto", "shm"),
        ("tcp", "tcp", "tcp"),
        ("tls", "tls", "tls"),
    ],
)
def test_a_pair_takes_the_best_that_both_offer(
    p_backend: str, d_backend: str, carried_by: str, new_pair: Callable[[Transports, Transports], LinkPair]
) -> None:
    pair = new_pair(transports(real(p_backend)), transports(real(d_backend)))
    pair.until(pair.linked)
    assert transports_of(pair.p) == transports_of(pair.d) == [carried_by]
    pair.moves_pages()


def test_nodes_of_two_hosts_use_gloo(new_pair: Callable[[Transports, Transports], LinkPair]) -> None:
    here = transports(real("auto"))
    pair = new_pair(replace(here, place=Place("another host")), here)
    pair.until(pair.linked)
    assert transports_of(pair.d) == ["gloo"]


@pytest.mark.parametrize("unbuildable", ["p", "d"])
def test_shared_memory_that_cannot_be_set_up_gives_way_to_gloo(
    unbuildable: str, new_pair: Callable[[Transports, Transports], LinkPair]
) -> None:
    good = transports(real("auto"))
    bad = replace(good, factories={**good.factories, "shm": Unbuildable(real("auto"), DeviceThreads())})
    pair = new_pair(bad if unbuildable == "p" else good, bad if unbuildable == "d" else good)
    pair.until(pair.linked)
    assert transports_of(pair.p) == transports_of(pair.d) == ["gloo"]
    assert pair.d.num_links_opened == 2
    reports = (*pair.p.link_reports, *pair.d.link_reports)
    assert [(report.peer, report.incoming) for report in reports] == [("d0", False), ("p0", True)]
    for report in reports:
        assert list(report.passed_over) == ["shm"]
        assert "no descriptors" in report.passed_over["shm"] or "peer" in report.passed_over["shm"]


class FirstByte:
    """As of a device whose memory cannot be read by its peer, which is told so by nothing."""

    def send(self, slot: Slot, nbytes: int, header: bytes, send: Callable[[bytes], Op]) -> Op:
        slot.payload(nbytes)[0] ^= 1
        return send(header)


def test_a_link_whose_first_chunk_is_corrupt_gives_way_to_the_next_transport(
    new_pair: Callable[[Transports, Transports], LinkPair],
) -> None:
    good = transports(real("auto"))
    damaging = FaultyLinkFactory(good.factories["shm"], FirstByte())
    bad = replace(good, factories={**good.factories, "shm": damaging})
    pair = new_pair(bad, good)
    pair.transfer(0, [1, 2], [3, 4])
    pair.until_received(0)
    assert pair.received[key(0)].corrupt
    pair.until(lambda: transports_of(pair.p) == transports_of(pair.d) == ["gloo"])
    (report,) = pair.d.link_reports
    assert report.passed_over["shm"] == "its first chunk arrived corrupt"
    assert num_slots_out(pair.p) == num_slots_out(pair.d) == 0
    pair.moves_pages(1)


class FullGpu(NcclLinkFactory):
    """On a GPU that has no memory left for slots."""

    def new_slot(self, nbytes: int) -> Slot:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")


@pytest.mark.parametrize("full", ["p", "d"])
def test_a_gpu_without_memory_for_slots_passes_the_transport_over(
    full: str, new_pair: Callable[[Transports, Transports], LinkPair]
) -> None:
    both = {}
    for name in "pd":
        nccl, gloo = transports(real("nccl")), transports(real("gloo"))
        factories = {**nccl.factories, **gloo.factories}
        if name == full:
            factories["nccl"] = FullGpu(real("nccl"), CPU, NCCL.new_group, DeviceThreads())
        both[name] = replace(nccl, factories=factories)
    pair = new_pair(both["p"], both["d"])
    pair.transfer(0, [1], [2])
    pair.until_received(0)
    pair.until(lambda: transports_of(pair.p) == transports_of(pair.d) == ["gloo"])
    (report,) = pair.d.link_reports
    assert "CUDA out of memory" in report.passed_over["nccl"]
    pair.moves_pages(1)


@pytest.mark.parametrize(
    ("backend", "entry", "value", "reason"),
    [
        ("auto", "unix/address", b"\xff", "building link"),
        ("tcp", "tcp/address", b"\xff", "building link"),
        ("tcp", "tcp/address", b"127.0.0.1 99999", "building link"),
        ("tcp", "tcp/address", b"127.0.0.1", "building link"),
        ("tls", "tls/0", b"", "building link"),
        ("tls", "tls/0", b"no certificate", "building link"),
    ],
)
def test_absurd_answers_of_a_peer_fail_the_link_alone_which_gives_way_to_the_next_transport(
    backend: str, entry: str, value: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def tamper(message: Struct) -> Struct:
        if isinstance(message, StoreSet) and message.name == entry and message.link.endswith("#1"):
            return msgspec.structs.replace(message, value=value)
        return message

    caplog.set_level(logging.INFO)
    with closing(LinkPair(real(backend), tamper=tamper)) as pair:
        pair.until(pair.linked)
        assert pair.d.num_links_opened == 2
        assert reason in caplog.text and "link_defect" not in caplog.text
        (report,) = pair.p.link_reports
        assert (report.transport, list(report.passed_over)) == (
            ("gloo", ["shm"]) if backend == "auto" else (backend, [])
        )
        assert reason in report.passed_over.get("shm", reason)
        assert num_slots_out(pair.p) == num_slots_out(pair.d) == 0


def test_chunks_fit_the_slots_of_both_ends(new_pair: Callable[[Transports, Transports], LinkPair]) -> None:
    small = transports(replace(real("gloo"), slot_nbytes=32 << 10))
    pair = new_pair(small, transports(real("gloo")))
    pair.moves_pages()


def test_a_node_that_goes_while_a_link_is_built_is_no_reason_for_another_transport(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def keep_waiting(message: Struct) -> Struct:
        return Ping(0) if isinstance(message, LinkOpen) else message

    caplog.set_level(logging.INFO)
    with closing(LinkPair(real("auto"), tamper=keep_waiting)) as pair:
        pair.until_opened(1)
    assert "link_lost" in caplog.text and "transport_fallback" not in caplog.text


@pytest.mark.parametrize(
    ("p_backend", "p_host", "d_backend", "reason"),
    [
        ("shm", "here", "gloo", "kv_transfer: the receiving node offers gloo, the sending node shm"),
        ("gloo", "here", "shm", "kv_transfer: the receiving node offers shm, the sending node gloo"),
        ("shm", "there", "auto", "shm: the nodes are not on one host"),
        ("shm", "", "shm", "shm: the nodes are not on one host"),
        ("tls", "here", "tcp", "--kv-transfer tcp needs --kv-tls on both nodes or on neither"),
        ("tcp", "here", "tls", "the receiving node offers tls, the sending node tcp"),
        ("tcp", "here", "auto", "the receiving node offers shm/gloo, the sending node tcp"),
    ],
)
def test_a_pair_with_nothing_in_common_is_refused_by_name(
    p_backend: str,
    p_host: str,
    d_backend: str,
    reason: str,
    new_pair: Callable[[Transports, Transports], LinkPair],
) -> None:
    p = replace(transports(real(p_backend)), place=Place(p_host))
    d = replace(transports(real(d_backend)), place=Place("here"))
    pair = new_pair(p, d)
    pair.d.open(key(0), "p0", [1], 0)
    pair.p.open(key(0), "d0")
    pair.until(lambda: key(0) in pair.received and key(0) in pair.sent)
    failed = pair.received[key(0)]
    assert isinstance(failed, ReceiveFailed)
    assert reason in failed.reason
    assert reason in pair.sent[key(0)].reason
    assert peer_states(pair.p) == {"d0": "refused"}


def test_neither_end_offers_shm_without_a_host() -> None:
    nowhere = replace(transports(real("auto")), place=Place())
    usable, passed_over = nowhere.in_common(("shm", "gloo"), Place())
    assert usable == ["gloo"]
    assert list(passed_over) == ["shm"]
    with pytest.raises(PeerMismatch):
        nowhere.in_common(("shm",), Place())


def test_what_the_flag_offers() -> None:
    assert list(make_transports(TransferOptions(), CPU).factories) == ["shm", "gloo"]
    assert make_transports(TransferOptions(), CPU).slot_nbytes == 4 << 20
    assert make_transports(TransferOptions(slot_nbytes=4096), CPU).slot_nbytes == 4096


def test_device_memory_of_links_is_slots_of_four_links_and_a_copy_of_each() -> None:
    gpu = torch.device("cuda", 0)
    assert links_nbytes(TransferOptions(), gpu) == 4 * (4 + 1) * (128 << 20)
    assert links_nbytes(TransferOptions(num_slots=2, slot_nbytes=1 << 20), gpu) == 4 * (2 + 1) * (1 << 20)
    assert links_nbytes(TransferOptions(), CPU) == 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="THIS BUILD OF TORCH HAS CUDA")
def test_what_cannot_work_on_a_gpu_is_not_offered_and_says_why() -> None:
    there = Place("here", "GPU-0")
    on_gpu = make_transports(TransferOptions(), torch.device("cuda", 0), lambda device: there)
    assert list(on_gpu.factories) == ["gloo"]
    assert on_gpu.slot_nbytes == 128 << 20
    usable, passed_over = on_gpu.in_common(("cuda-ipc", "shm", "nccl", "gloo"), there)
    assert usable == ["gloo"]
    for name, reason in {"cuda-ipc": "no libcudart", "shm": "no libcudart", "nccl": "has no NCCL"}.items():
        assert reason in passed_over[name]
        with pytest.raises(ConfigError, match=reason):
            make_transports(TransferOptions(backend=name), torch.device("cuda", 0), lambda device: there)


@pytest.mark.parametrize(
    ("theirs", "usable"),
    [
        (Place("here", "GPU-0"), ["cuda-ipc", "shm"]),
        (Place("here", "GPU-1"), ["cuda-ipc", "shm", "nccl"]),
        (Place("there", "GPU-1"), ["nccl"]),
        (Place("there"), []),
        (Place("here"), ["shm"]),
    ],
)
def test_what_two_places_can_use(theirs: Place, usable: list[str]) -> None:
    options, runtime, threads = real("auto"), FakeRuntime(), DeviceThreads()
    factories = {
        "cuda-ipc": CudaIpcLinkFactory(options, runtime, threads),
        "shm": ShmLinkFactory(options, threads, runtime),
        "nccl": NcclLinkFactory(options, CPU, FakeNccl().new_group, threads),
    }
    ours = Place("here", "GPU-0")
    assert [name for name, made in factories.items() if made.obstacle(ours, theirs) is None] == usable


def test_the_identity_of_a_host_names_boot_network_and_user() -> None:
    boot, network, uid = host_identity().split("/")
    assert len(boot) == 36
    assert int(network) > 0
    assert int(uid) == os.getuid()
