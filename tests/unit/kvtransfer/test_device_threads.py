"""Every thread of a link makes the node's device current before it does anything, as `--device cuda:1` needs."""

from __future__ import annotations

import ast
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

import shared
from shared.device_threads import DeviceThreads
from tests.unit.kvtransfer.link_pair import BACKENDS_IN_ONE_PROCESS, LinkPair, real, transports

ALLOWED = {
    "engine/forward_stream.py": "the worker of a CPU",
    "engine/node_http.py": "answers probes and scrapes",
    "engine/node_process.py": "waits for the end of standard input",
    "kvtransfer/transports/cuda/nccl.py": "a timer, which only marks a link as given up",
}
"""Files of the engine and the transfer that make threads by themselves, which touch no device."""


class Entered:
    """Notes the threads that have made the device current, and those that have a stream of their own."""

    def __init__(self) -> None:
        self.current: set[threading.Thread] = set()
        self.with_stream: set[threading.Thread] = set()
        self.threads = DeviceThreads(
            lambda: self.current.add(threading.current_thread()),
            lambda: self.with_stream.add(threading.current_thread()),
        )


@pytest.mark.parametrize("backend", BACKENDS_IN_ONE_PROCESS)
def test_every_thread_of_a_link_enters(backend: str) -> None:
    before = set(threading.enumerate())
    entered = Entered()
    with closing(
        LinkPair(
            real(backend),
            p_transports=transports(real(backend), entered.threads),
            d_transports=transports(real(backend), entered.threads),
        )
    ) as pair:
        pair.transfer(1, [1, 2, 3], [4, 5, 6])
        pair.until_received(1)
        running = (
            set(threading.enumerate())
            - before
            - {pair.sending.control._thread, pair.receiving.control._thread}
        )
        assert len(running) >= 3, "a driver at each end, and the copier of the sender"
        assert running <= entered.current
        moving = {thread for thread in running if thread.name.startswith(("link", "copier"))}
        assert len(moving) == 3 and moving <= entered.with_stream


def test_a_thread_enters_before_it_runs() -> None:
    order: list[str] = []
    threads = DeviceThreads(lambda: order.append("enter"), lambda: order.append("stream"))
    threads.start("one", lambda: order.append("run"), own_stream=True).join()
    assert order == ["enter", "stream", "run"]
    with threads.executor("two") as executor:
        executor.submit(lambda: order.append("call")).result()
    assert order[3:] == ["enter", "call"]


def test_a_cpu_has_nothing_to_enter() -> None:
    assert DeviceThreads.of(torch.device("cpu")) == DeviceThreads()
    assert DeviceThreads.of(torch.device("cuda", 1)).enter is not DeviceThreads().enter
    with pytest.raises(AssertionError, match="index"):
        DeviceThreads.of(torch.device("cuda"))


def test_no_other_place_makes_threads_that_could_touch_the_device() -> None:
    root, found = Path(shared.__file__).parent, set()
    for part in ("engine", "kvtransfer", "kvcache", "kernels"):
        for path in (root / part).rglob("*.py"):
            calls = [
                node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
            ]
            names = {
                call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls
            }
            if names & {"Thread", "ThreadPoolExecutor", "Timer"}:
                found.add(str(path.relative_to(root)))
    assert found == set(ALLOWED)
