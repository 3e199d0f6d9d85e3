"""What tests look at inside a side of the transfer."""

from __future__ import annotations

from typing import Any

from shared.kvtransfer.link_worker import LinkWorker
from shared.kvtransfer.receive_worker import ReceiveWorker
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.send_worker import SendWorker
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.side import Peer

Side = KVSender | KVReceiver


def num_live(side: Side) -> int:
    """Links that are built and not dead."""
    return len(side.link_reports)


def transports_of(side: Side) -> list[str]:
    """What carries each of these links."""
    return [report.transport for report in side.link_reports]


def slots_out(link: LinkWorker) -> int:
    """Staging slots of one link that are not home."""
    if isinstance(link, SendWorker):
        return link._ring.num_out
    assert isinstance(link, ReceiveWorker)
    return len(link._granted)


def num_slots_out(side: Side) -> int:
    """Staging slots that are not home, those that ops of dead links still hold included. 0 when idle."""
    with side._lock:
        return sum(slots_out(link) for link in side._links if not link.finished)


def peer_states(side: Side) -> dict[str, str]:
    """Each peer: refused, silent, linked, linking, or unlinked."""
    with side._lock:
        return {peer_id: _state(peer) for peer_id, peer in side._peers.items()}


def _state(peer: Peer[Any]) -> str:
    if peer.refused is not None:
        return "refused"
    if peer.silent:
        return "silent"
    if peer.link is None:
        return "unlinked"
    return "linked" if peer.link.live else "linking"
