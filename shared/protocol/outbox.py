"""How a part sends a control message without knowing the transport."""

from __future__ import annotations

from typing import Protocol

from shared.protocol.messages import Struct


class Outbox(Protocol):
    """Sends control messages to named peers.

    `send` never blocks and may be called from any thread. Messages to one peer arrive in order or, when the
    peer is gone, not at all: a sender that needs an answer keeps a deadline. Real: `channel.ControlThread`;
    in tests: `fake_network.FakeNetwork`.
    """

    def send(self, to: str, message: Struct) -> None:
        """Queue `message` for the peer `to` (a node id on a pair, a router incarnation towards a router)."""
        ...
