"""Both sides of the transfer on one node, over its one control socket.

The sender dials the receiving nodes that it is to reach (`peering`); the receiver answers the sending nodes that dial
this one. Two nodes that send to each other so have two connections and two links, and each direction lives and dies
by itself. A side that is not used has no thread, no descriptor and no peer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.peering import REDIAL_S, Peering
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.sender import KVSender
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.transfer_messages import SenderToReceiver


@dataclass(frozen=True)
class TransferSides:
    """The scheduler that uses a side ticks and polls it. The node closes both, whatever its role."""

    sender: KVSender
    peering: Peering
    receiver: KVReceiver

    def handlers(self) -> dict[str, Handlers]:
        """Handlers for the sending nodes that dial this one, to be admitted once the receiver is used."""
        return {"sender": Handlers(msgspec.msgpack.Decoder(SenderToReceiver), self.receiver.on_message)}

    def close(self) -> None:
        """End every transfer and link of both sides. A side that its scheduler has closed before stays closed."""
        self.sender.close()
        self.receiver.close()


def make_sides(own: Endpoint, control: ControlThread) -> TransferSides:
    """Both sides of the node `own` over `control`, which redials and renews leases for them from now on.

    `own` sends to the peers that this node dialled.
    """
    sender = KVSender(own)
    receiver = KVReceiver(replace(own, outbox=control.to_diallers))
    peering = Peering(own.node, control, sender, own.clock)
    control.every(REDIAL_S / 2, peering.redial)
    control.every(receiver.renewal_s, receiver.renew_leases)
    return TransferSides(sender, peering, receiver)
