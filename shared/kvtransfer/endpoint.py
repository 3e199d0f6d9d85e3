"""This node as one end of its transfers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.config import TransferOptions
from shared.kvtransfer.layout import PageStore
from shared.kvtransfer.transports.choice import Transports
from shared.protocol.messages import KVLayout, NodeRef, Outbox
from shared.timeline import Clock


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What a KVSender or a KVReceiver is made of.

    `wake` tells the scheduler that `poll` has something. It is called from any thread, under the lock of the side,
    and must only signal.
    """

    node: NodeRef
    layout: KVLayout
    pages: PageStore
    outbox: Outbox
    transports: Transports
    clock: Clock
    options: TransferOptions
    wake: Callable[[], None]
