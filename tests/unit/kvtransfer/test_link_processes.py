"""A prefill node in a process of its own, killed in the middle of a transfer."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

import pytest
import torch

from shared.config import TransferOptions
from shared.kvtransfer.states import Received, ReceiveFailed
from shared.protocol.messages import ReqKey
from tests.forked import context
from tests.unit.kvtransfer.link_pair import (
    RealNode,
    key,
    pattern,
    prefill_process,
    real,
)
from tests.unit.kvtransfer.looks import num_live, num_slots_out

torch.set_num_threads(1)
NUM_PAGES = 4096  # 128 MB: long enough to die in the middle


class Decode:
    """A receiving node here; sending processes come and go."""

    def __init__(self, options: TransferOptions) -> None:
        self.options = options
        self.node = RealNode("d0", options, num_pages=NUM_PAGES)
        self.side, self.pool, self.ended = self.node.receiver, self.node.pool, self.node.received
        self.processes: list[BaseProcess] = []
        self.num_opened = 0

    @property
    def peer(self) -> str:
        """The newest process."""
        return f"p{len(self.processes)}"

    def spawn(self) -> BaseProcess:
        name = f"p{len(self.processes) + 1}"
        args = (name, self.node.ref, NUM_PAGES, self.options)
        process = context().Process(target=prefill_process, args=args, daemon=True)
        process.start()
        self.processes.append(process)
        self.until(lambda: num_live(self.side) == 1)
        return process

    def open(self) -> ReqKey:
        new = key(self.num_opened)
        self.num_opened += 1
        self.side.open(new, self.peer, list(range(1, NUM_PAGES)), 0)
        return new

    def until(self, condition: Callable[[], bool]) -> None:
        self.node.until(condition)

    def open_and_get_some(self) -> ReqKey:
        """Of a transfer that goes on for half a second."""
        self.pool.buffer_LSNHPD.zero_()
        new = self.open()
        self.until(lambda: bool(self.pool.buffer_LSNHPD[:, :, 1].any()))
        assert new not in self.ended
        return new

    def close(self) -> None:
        self.node.close()
        for process in self.processes:
            process.kill()
            process.join()

    def works(self) -> None:
        new = self.open()
        self.until(lambda: new in self.ended)
        assert isinstance(self.ended[new], Received), self.ended[new]
        assert torch.equal(self.pool.buffer_LSNHPD[:, :, 1:], pattern(NUM_PAGES)[:, :, 1:])


NewDecode = Callable[[TransferOptions], Decode]


@pytest.fixture
def new_decode() -> Iterator[NewDecode]:
    with contextlib.ExitStack() as exits:

        def new(options: TransferOptions) -> Decode:
            decode = Decode(options)
            exits.callback(decode.close)
            return decode

        yield new


@pytest.mark.processes
@pytest.mark.parametrize(
    "backend", ["gloo", "shm", "tcp"]
)  # cuda-ipc has the canary of shm, and tls that of tcp
def test_sigkill_in_the_middle_fails_the_transfer_and_a_new_incarnation_works(
    new_decode: NewDecode, backend: str
) -> None:
    decode = new_decode(real(backend))
    process = decode.spawn()
    new = decode.open_and_get_some()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    decode.until(lambda: new in decode.ended)
    failed = decode.ended[new]
    assert isinstance(failed, ReceiveFailed), "noticed without pings, whose timeout is not over"
    decode.pool.buffer_LSNHPD.zero_()  # the pages are ours again: nothing may write them now
    process.join()
    decode.until(lambda: num_slots_out(decode.side) == 0)
    assert not decode.pool.buffer_LSNHPD.any()
    decode.spawn()
    decode.works()
