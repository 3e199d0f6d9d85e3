"""Real links in one process: threads, secrets, leaks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from shared.config import TransferOptions
from shared.kvtransfer.link import RECEIVER, SENDER
from shared.kvtransfer.states import Received, ReceiveFailed
from shared.protocol.messages import Struct
from shared.protocol.transfer_messages import LinkOpen
from tests.patience import PATIENCE_S, until
from tests.unit.kvtransfer.link_pair import (
    BACKENDS,
    BACKENDS_IN_ONE_PROCESS,
    Ends,
    LinkPair,
    key,
    num_descriptors,
    num_shared_mappings,
    num_threads,
    real,
    transports,
)
from tests.unit.kvtransfer.looks import num_live, num_slots_out

torch.set_num_threads(1)


@pytest.fixture(params=BACKENDS_IN_ONE_PROCESS)
def options(request: pytest.FixtureRequest) -> TransferOptions:
    return real(request.param)


@pytest.fixture
def pair(options: TransferOptions) -> Iterator[LinkPair]:
    pair = LinkPair(options)
    yield pair
    pair.close()


def test_pages_arrive_byte_for_byte(pair: LinkPair) -> None:
    d_pages = list(range(40, 0, -1))
    pair.transfer(0, list(range(1, 41)), d_pages)
    pair.until(lambda: key(0) in pair.sent and key(0) in pair.received)
    assert pair.sent[key(0)].ok
    received = pair.received[key(0)]
    assert isinstance(received, Received)
    assert received.nbytes == pair.sent[key(0)].nbytes == 40 * 4 * 2 * pair.p_pool.page_nbytes
    assert torch.equal(pair.d_pool.buffer_LSNHPD[:, :, d_pages], pair.p_pool.buffer_LSNHPD[:, :, 1:41])
    assert pair.woken.is_set()


def test_an_idle_link_outlives_the_timeout_of_its_ops(options: TransferOptions) -> None:
    pair = LinkPair(dataclasses.replace(options, op_timeout_s=2))
    pair.until(pair.linked)
    over_at = time.monotonic() + 2.5
    pair.until(lambda: time.monotonic() > over_at)
    pair.moves_pages()
    assert pair.d.num_links_opened == 1
    pair.close()


def test_cancelled_chunks_are_drained_and_the_link_goes_on(pair: LinkPair) -> None:
    for number in range(20):
        pair.transfer(number, list(range(1, 60)), list(range(1, 60)))
        (pair.p if number % 2 else pair.d).cancel(key(number), "the client went away")
    pair.transfer(99, [1, 2], [3, 4])
    pair.until(lambda: len(pair.received) == len(pair.sent) == 21)
    assert isinstance(pair.received[key(99)], Received)
    assert pair.d.num_links_opened == 1
    until(lambda: num_slots_out(pair.p) == num_slots_out(pair.d) == 0)


def test_a_wrong_secret_fails_the_challenge(options: TransferOptions) -> None:
    def tamper(message: Struct) -> Struct:
        return (
            msgspec.structs.replace(message, secret=b"guessed") if isinstance(message, LinkOpen) else message
        )

    pair = LinkPair(options, tamper=tamper)
    pair.d.open(key(0), "p0", [1], 0)
    pair.until(lambda: key(0) in pair.received)
    # The end that finds out first hangs up on the other.
    failed = pair.received[key(0)]
    assert isinstance(failed, ReceiveFailed)
    assert "challenge" in failed.reason or "peer" in failed.reason
    assert num_live(pair.p) == num_live(pair.d) == 0
    pair.close()


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_end_that_is_closed_is_noticed_at_the_other_one(backend: str, rank: int) -> None:
    """As that of a process that was killed, which the kernel closes."""
    (factory,) = transports(real(backend)).factories.values()
    with contextlib.closing(Ends(factory)) as ends:
        ends.links[rank].abort()
        assert ends.died[1 - rank].wait(PATIENCE_S)


def test_a_lost_link_is_built_anew(pair: LinkPair) -> None:
    pair.until(pair.linked)
    pair.transfer(0, list(range(1, 60)), list(range(1, 60)))
    worker = pair.p._peers["d0"].link
    assert worker is not None
    worker.abort_ops()  # the data connection breaks; both control connections live
    pair.until(lambda: key(0) in pair.received and key(0) in pair.sent)
    pair.until(pair.linked)
    assert pair.d.num_links_opened == 2
    pair.moves_pages(1)


def test_forty_links_leave_nothing_behind(options: TransferOptions) -> None:
    warm_up = LinkPair(options)
    warm_up.until(warm_up.linked)
    warm_up.close()
    threads, descriptors, mappings = num_threads(), num_descriptors(), num_shared_mappings()
    pair = LinkPair(options)
    for number in range(39):
        pair.until(pair.linked)
        if number % 3 == 0:
            pair.moves_pages(number)
        pair.p.on_disconnected("d0", "test")
        pair.p.on_connected("d0")
        pair.until_opened(number + 2)
    pair.until(pair.linked)
    assert pair.d.num_links_opened >= 40
    pair.close()
    until(
        lambda: (
            num_threads() <= threads
            and num_descriptors() <= descriptors
            and num_shared_mappings() <= mappings
        )
    )
