"""A node from its start to its end, in a process of its own, with schedulers that stop it at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shared.config import CacheOptions, ModelOptions, NodeConfig
from shared.engine.loop_parts import NodeParts
from shared.engine.node_process import BuildRole, Scheduler, run_node
from shared.kvtransfer.sides import TransferSides
from shared.kvtransfer.states import ReceiveFailed, SendEnded
from shared.protocol.messages import PROTOCOL_VERSION, Cancel, Drained, ReqKey, Role, RouterHello, SetRole
from shared.protocol.router_port import RouterPort
from tests.forked import context
from tests.modelzoo import make_model
from tests.patience import PATIENCE_S
from tests.unit.protocol.conftest import Party

KEY = ReqKey("router", "r")
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


class StopsAtOnce:
    """A scheduler that uses neither side of the transfer."""

    reqs = ()

    def step(self) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    def close(self, reason: str) -> None:
        pass


def serve_and_stop(role: Role, folder: Path) -> None:
    """A node that shuts down closes both sides of the transfer."""
    sides: list[TransferSides] = []

    def build_role(parts: NodeParts) -> Scheduler:
        parts.transfer.sender.open(KEY, "d9#1")
        parts.transfer.receiver.open(KEY, "p9#1", [1], 0)
        sides.append(parts.transfer)
        return StopsAtOnce()

    config = NodeConfig(
        model=ModelOptions(model=str(folder), device="cpu"), cache=CacheOptions(max_total_tokens=256)
    )
    assert run_node(role, config, lambda role: build_role) == 0
    (sent,), (received,) = sides[0].sender.poll(), sides[0].receiver.poll()
    assert isinstance(sent, SendEnded)
    assert isinstance(received, ReceiveFailed)
    assert sent.reason == received.reason == "this node is shutting down"


class ChangesItsRole:
    """A scheduler in whose second step a router has the node take the other role."""

    reqs = ()

    def __init__(self, router_port: RouterPort, own: Role, closed: list[str]) -> None:
        self._router_port = router_port
        self._next = Role.DECODE if own is Role.PREFILL else Role.PREFILL
        self._closed = closed
        self._num_steps = 0

    def step(self) -> bool:
        self._num_steps += 1
        assert self._num_steps < 3, "no step follows that in which the last router has let it go"
        messages = {1: (RouterHello("r", PROTOCOL_VERSION), SetRole(1, self._next, 60.0)), 2: (Drained(),)}
        for message in messages[self._num_steps]:
            self._router_port.on_message("r", message)
        return False

    def close(self, reason: str) -> None:
        self._closed.append(reason)


def change_roles_and_stop(role: Role, folder: Path) -> None:
    """A node that takes the other role, and then its first one, keeps what is loaded."""
    seen: list[NodeParts] = []
    closed: list[str] = []

    def builder_of(role: Role) -> BuildRole:
        def build_role(parts: NodeParts) -> Scheduler:
            seen.append(parts)
            return StopsAtOnce() if len(seen) == 3 else ChangesItsRole(parts.router_port, role, closed)

        return build_role

    config = NodeConfig(
        model=ModelOptions(model=str(folder), device="cpu"), cache=CacheOptions(max_total_tokens=256)
    )
    assert run_node(role, config, builder_of) == 0
    first, *others = seen
    assert all(parts.engine is first.engine for parts in others)
    hellos = [parts.router_port.hello for parts in seen]
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    assert [hello.role for hello in hellos] == [role, other, role]
    assert len({hello.node.incarnation for hello in hellos}) == 3
    assert {(hello.node.node_id, hello.node.address) for hello in hellos} == {
        (hellos[0].node.node_id, hellos[0].node.address)
    }, "it keeps its name and its port"
    assert [f"becomes a {hello.role} node" in why for hello, why in zip(hellos[1:], closed, strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("scenario", [serve_and_stop, change_roles_and_stop])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_node(role: Role, scenario: Callable[[Role, Path], None], tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", num_hidden_layers=2)
    node = context().Process(target=scenario, args=(role, folder))
    node.start()
    node.join(PATIENCE_S)
    assert node.exitcode == 0


def load_without_a_gpu(value: str | None) -> None:
    """CUDA reads the variable when it is initialized, and looking for GPUs may do that."""
    os.environ.pop(QUEUES, None)
    if value is not None:
        os.environ[QUEUES] = value
    config = NodeConfig(model=ModelOptions(model="none", device="cuda:99"))
    assert run_node(Role.PREFILL, config) == 2
    assert os.environ[QUEUES] == (value or "32")


@pytest.mark.parametrize("value", [None, "8"])
def test_hardware_queues_are_set_before_a_gpu_is_looked_for(value: str | None) -> None:
    node = context().Process(target=load_without_a_gpu, args=(value,))
    node.start()
    node.join(PATIENCE_S)
    assert node.exitcode == 0


class Fails:
    """A scheduler with a defect, which a message of a router brings to light."""

    reqs = ()

    def __init__(self, router_port: RouterPort) -> None:
        self._router_port = router_port

    def step(self) -> bool:
        if self._router_port.take():
            raise RuntimeError("of the test")
        return False

    def close(self, reason: str) -> None:
        self._router_port.leave(reason)


def fail(folder: Path, addresses: Connection) -> None:
    def build_role(parts: NodeParts) -> Scheduler:
        addresses.send(parts.router_port.hello.node.address)
        return Fails(parts.router_port)

    config = NodeConfig(
        model=ModelOptions(model=str(folder), device="cpu"), cache=CacheOptions(max_total_tokens=256)
    )
    run_node(Role.DECODE, config, lambda role: build_role)


def test_a_node_that_ends_by_an_error_says_so_first(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", num_hidden_layers=2)
    addresses, theirs = multiprocessing.Pipe(duplex=False)
    node = context().Process(target=fail, args=(folder, theirs))
    node.start()
    router = Party("router", None).start()
    try:
        assert addresses.poll(PATIENCE_S)
        router.dialled("n", addresses.recv())
        router.send("n", Cancel(KEY))
        _, leaving = router.hear()
        assert leaving.crashed and "RuntimeError: of the test" in leaving.reason
    finally:
        router.close()
        node.join(PATIENCE_S)
    assert node.exitcode == 1
