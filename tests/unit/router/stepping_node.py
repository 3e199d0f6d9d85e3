"""A fake decode node that steps: all sequences of a batch get their next token in one message, as on a real one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from shared.protocol.messages import (
    Cancel,
    Decode,
    Finish,
    NodeLimits,
    Prefill,
    ReqKey,
    Role,
    RouterToNode,
    Stop,
    TokenEntry,
    Tokens,
)
from tests.unit.router.fake_node import FakeNode

ROOMY = NodeLimits(context_length=65536, max_total_num_tokens=1 << 24, max_running_requests=65536)


@dataclass
class _Batch:
    waiting_for: int
    step_s: float
    num_told: dict[ReqKey, int] = field(default_factory=dict)
    wanted: dict[ReqKey, int] = field(default_factory=dict)


class SteppingNode(FakeNode):
    """The `routing_key` of a request, `NAME:SIZE:STEP_S`, says in which batch it runs and how fast that steps.

    Without one it is a batch by itself. A batch begins when SIZE sequences are in it. It keeps its pace by the clock:
    late steps are made up for.
    """

    def __init__(self, node_id: str = "") -> None:
        super().__init__(Role.DECODE, node_id, script=_enrol, limits=ROOMY)
        self._batches: dict[str, _Batch] = {}
        self.num_told = 0

    @property
    def num_running(self) -> int:
        return sum(len(batch.num_told) for batch in self._batches.values())

    def hear(self, message: RouterToNode) -> None:
        super().hear(message)
        if isinstance(message, Cancel | Stop):
            for batch in self._batches.values():
                batch.num_told.pop(message.key, None)

    async def enrol(self, message: Decode) -> None:
        name, size, step_s = (message.work.routing_key or f"{message.key}:1:0").rsplit(":", 2)
        batch = self._batches.setdefault(name, _Batch(int(size), float(step_s)))
        batch.num_told[message.key], batch.wanted[message.key] = 0, message.work.params.max_new_tokens
        if len(batch.wanted) == batch.waiting_for:
            await self._step_until_empty(batch)
            del self._batches[name]

    async def _step_until_empty(self, batch: _Batch) -> None:
        begin, step = time.monotonic(), 0
        while batch.num_told:
            step += 1
            await asyncio.sleep(max(0.0, begin + step * batch.step_s - time.monotonic()))
            entries: dict[str, list[TokenEntry]] = {}
            for key in list(batch.num_told):
                entries.setdefault(key.router, []).append(self._next(batch, key))
            for router, told in entries.items():
                self.send(Tokens(tuple(told)), router)

    def _next(self, batch: _Batch, key: ReqKey) -> TokenEntry:
        position = batch.num_told[key]
        last = position + 1 == batch.wanted[key]
        batch.num_told[key] += 1
        self.num_told += 1
        if last:
            del batch.num_told[key]
        token_id = self.story[position % len(self.story)]
        return TokenEntry(key, position, (token_id,), Finish("length") if last else None)


async def _enrol(node: FakeNode, message: Prefill | Decode) -> None:
    assert isinstance(node, SteppingNode) and isinstance(message, Decode)
    await node.enrol(message)
