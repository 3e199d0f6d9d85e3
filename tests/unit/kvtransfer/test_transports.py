"""Which transport a pair uses, what it falls back to, and who is refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from msgspec import Struct

from shared.config import TransferOptions
from shared.errors import ConfigError, LinkError, TransportMismatch
from shared.kvtransfer.link import Link, LinkSpec
from shared.kvtransfer.states import Received, ReceiveFailed
from shared.kvtransfer.transports.choice import Transports, host_identity, make_transports
from shared.kvtransfer.transports.shm import ShmLinkFactory
from shared.protocol.messages import Ping
from shared.protocol.transfer_messages import LinkOpen
from tests.unit.kvtransfer.link_pair import LinkPair, key, real, transports
from tests.unit.kvtransfer.looks import peer_states

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
    ],
)
def test_a_pair_takes_the_best_that_both_offer(
    p_backend: str, d_backend: str, carried_by: str, new_pair: Callable[[Transports, Transports], LinkPair]
) -> None:
    pair = new_pair(transports(real(p_backend)), transports(real(d_backend)))
    pair.until(pair.linked)
    assert pair.p.links_by_transport == pair.d.links_by_transport == {carried_by: 1}
    pair.transfer(0, [1, 2, 3], [4, 5, 6])
    pair.until_received(0)
    assert isinstance(pair.received[key(0)], Received)


def test_nodes_of_two_hosts_use_gloo(new_pair: Callable[[Transports, Transports], LinkPair]) -> None:
    here = transports(real("auto"))
    pair = new_pair(Transports(here.factories, "another host"), here)
    pair.until(pair.linked)
    assert pair.d.links_by_transport == {"gloo": 1}


@pytest.mark.parametrize("unbuildable", ["p", "d"])
def test_shared_memory_that_cannot_be_set_up_gives_way_to_gloo(
    unbuildable: str, new_pair: Callable[[Transports, Transports], LinkPair]
) -> None:
    good = transports(real("auto"))
    bad = Transports({"shm": Unbuildable(real("auto"), CPU), "gloo": good.factories["gloo"]}, good.host)
    pair = new_pair(bad if unbuildable == "p" else good, bad if unbuildable == "d" else good)
    pair.until(pair.linked)
    assert pair.p.links_by_transport == pair.d.links_by_transport == {"gloo": 1}
    assert pair.d.peers.num_links_opened == 2


def test_a_node_that_goes_while_a_link_is_built_is_no_reason_for_another_transport(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def keep_waiting(message: Struct) -> Struct:
        return Ping(0) if isinstance(message, LinkOpen) else message

    caplog.set_level(logging.INFO)
    pair = LinkPair(real("auto"), tamper=keep_waiting)
    try:
        pair.until_opened(1)
    finally:
        pair.close()
    assert "link_lost" in caplog.text and "transport_fallback" not in caplog.text


@pytest.mark.parametrize(
    ("p_backend", "p_host", "d_backend", "reason"),
    [
        ("shm", "here", "gloo", "kv_transfer: the receiving node offers gloo, the sending node shm"),
        ("gloo", "here", "shm", "kv_transfer: the receiving node offers shm, the sending node gloo"),
        ("shm", "there", "auto", "kv_transfer: shm is for nodes of one host"),
        ("shm", "", "shm", "kv_transfer: shm is for nodes of one host"),
    ],
)
def test_a_pair_with_nothing_in_common_is_refused_by_name(
    p_backend: str,
    p_host: str,
    d_backend: str,
    reason: str,
    new_pair: Callable[[Transports, Transports], LinkPair],
) -> None:
    p = Transports(transports(real(p_backend)).factories, p_host)
    d = Transports(transports(real(d_backend)).factories, "here")
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
    nowhere = Transports(transports(real("auto")).factories, "")
    assert nowhere.in_common(("shm", "gloo"), "") == ["gloo"]
    with pytest.raises(TransportMismatch):
        nowhere.in_common(("shm",), "")


def test_what_the_flag_offers() -> None:
    assert list(make_transports(TransferOptions(), CPU).factories) == ["shm", "gloo"]
    assert list(make_transports(TransferOptions(), torch.device("cuda")).factories) == ["gloo"]
    with pytest.raises(ConfigError, match="KV pages are on cuda"):
        make_transports(TransferOptions(backend="shm"), torch.device("cuda"))
    with pytest.raises(ConfigError, match="unknown transfer backend 'nixl'"):
        make_transports(TransferOptions(backend="nixl"), CPU)


def test_the_identity_of_a_host_names_boot_network_and_user() -> None:
    boot, network, uid = host_identity().split("/")
    assert len(boot) == 36
    assert int(network) > 0
    assert int(uid) == os.getuid()
