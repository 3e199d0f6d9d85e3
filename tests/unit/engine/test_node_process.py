"""A node from its start to its end, in a process of its own, with a scheduler that stops it at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from shared.config import CacheOptions, ModelOptions, NodeConfig
from shared.engine.node_process import NodeParts, Scheduler, run_node
from shared.kvtransfer.sides import TransferSides
from shared.kvtransfer.states import ReceiveFailed, SendEnded
from shared.protocol.channel import Handlers
from shared.protocol.messages import ReqKey, Role
from tests.modelzoo import make_model
from tests.patience import PATIENCE_S

KEY = ReqKey("router", "r")


class StopsAtOnce:
    """A scheduler that uses neither side of the transfer."""

    def step(self) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    def close(self, reason: str) -> None:
        pass


def serve_and_stop(role: Role, folder: Path) -> None:
    sides: list[TransferSides] = []

    def build_role(parts: NodeParts) -> tuple[Scheduler, dict[str, Handlers]]:
        parts.transfer.sender.open(KEY, "d9#1")
        parts.transfer.receiver.open(KEY, "p9#1", [1], 0)
        sides.append(parts.transfer)
        return StopsAtOnce(), {}

    config = NodeConfig(
        model=ModelOptions(model=str(folder), device="cpu"), cache=CacheOptions(max_total_tokens=256)
    )
    assert run_node(role, config, build_role) == 0
    (sent,), (received,) = sides[0].sender.poll(), sides[0].receiver.poll()
    assert isinstance(sent, SendEnded)
    assert isinstance(received, ReceiveFailed)
    assert sent.reason == received.reason == "this node is shutting down"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_node_that_shuts_down_closes_both_sides_of_the_transfer(role: Role, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", num_hidden_layers=2)
    node = multiprocessing.get_context("spawn").Process(target=serve_and_stop, args=(role, folder))
    node.start()
    node.join(PATIENCE_S)
    assert node.exitcode == 0
