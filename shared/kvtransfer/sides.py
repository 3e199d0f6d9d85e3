"""Both sides of the transfer on one node, over its one control socket.

The sender dials the receiving nodes that it is to reach (`peering`); the receiver answers the sending nodes that dial
this one. Two nodes that send to each other so have two connections and two links, and each direction lives and dies
by itself. A side that is not used has no thread, no descriptor and no peer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shared.config import TransferOptions
from shared.kvtransfer.layout import PageStore
from shared.kvtransfer.peering import REDIAL_S, DialledPeering
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.transports.choice import Transports
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.messages import KVLayout, NodeRef, SenderToReceiver
from shared.timeline import Clock


@dataclass(frozen=True)
class TransferSides:
    """The scheduler that uses a side ticks, polls and closes it."""

    sender: KVSender
    peering: DialledPeering
    receiver: KVReceiver

    def handlers(self) -> dict[str, Handlers]:
        """How sending nodes are answered; to be admitted once the receiver is used."""
        return {"sender": Handlers(msgspec.msgpack.Decoder(SenderToReceiver), self.receiver.on_message)}


def make_sides(
    *,
    node: NodeRef,
    layout: KVLayout,
    pages: PageStore,
    control: ControlThread,
    transports: Transports,
    clock: Clock,
    options: TransferOptions,
    wake: Callable[[], None],
) -> TransferSides:
    """Both sides of `node`; `control` redials and renews leases for them from now on."""
    sender = KVSender(
        node=node,
        layout=layout,
        pages=pages,
        outbox=control.to_dialled,
        transports=transports,
        clock=clock,
        options=options,
        wake=wake,
    )
    receiver = KVReceiver(
        node=node,
        layout=layout,
        pages=pages,
        outbox=control.to_diallers,
        transports=transports,
        clock=clock,
        options=options,
        wake=wake,
    )
    peering = DialledPeering(node, control, sender, clock)
    control.every(REDIAL_S / 2, peering.redial)
    control.every(receiver.renewal_s, receiver.renew_leases)
    return TransferSides(sender, peering, receiver)
