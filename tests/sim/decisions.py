"""What the schedulers decided, as text: one line for each launched batch of each node."""

from __future__ import annotations

from collections import defaultdict

from planner.simulator.node import SimNode
from shared.scheduling.plan import ScheduleBatch, ScheduledReq


class DecisionLog:
    """Give `on_launch` to a fleet.

    extend 3[0:12) 4[0:9)*        tokens [0, 12) of request 3, all of request 4, of which a token is sampled
    decode 1 2 x5                 five decode steps of requests 1 and 2
    extend 3[0:12) decode 1 2     both in one forward
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[str, int]]] = defaultdict(list)

    def on_launch(self, node: SimNode, batch: ScheduleBatch) -> None:
        """A batch goes to the forward stream."""
        words: list[str] = []
        if batch.extends:
            words += ["extend", *map(_span, batch.extends)]
        if batch.decodes:
            words += ["decode", *(item.req.key.rid for item in batch.decodes)]
        text = " ".join(words)
        lines = self._lines[node.ref.node_id]
        if lines and lines[-1][0] == text:
            lines[-1] = (text, lines[-1][1] + 1)
        else:
            lines.append((text, 1))

    def text(self) -> dict[str, list[str]]:
        """The lines of each node, in order of time."""
        return {
            node_id: [text if count == 1 else f"{text} x{count}" for text, count in lines]
            for node_id, lines in sorted(self._lines.items())
        }


def _span(item: ScheduledReq) -> str:
    samples = "" if item.position is None else "*"
    return f"{item.req.key.rid}[{item.start}:{item.start + item.length}){samples}"
