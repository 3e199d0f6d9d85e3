"""What tests look at inside a side of the transfer."""

from __future__ import annotations

from shared.kvtransfer.link_worker import LinkLoop
from shared.kvtransfer.peers import Peer
from shared.kvtransfer.receive_loop import ReceiveLoop
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.send_loop import SendLoop
from shared.kvtransfer.sender import KVSender

Side = KVSender | KVReceiver


def num_live(side: Side) -> int:
    """Links that are built and not dead."""
    return len(side.link_reports)


def transports_of(side: Side) -> list[str]:
    """What carries each of these links."""
    return [report.transport for report in side.link_reports]


def slots_out(loop: LinkLoop) -> int:
    """Staging slots of one link that are not home."""
    if isinstance(loop, SendLoop):
        return loop._ring.num_out
    assert isinstance(loop, ReceiveLoop)
    return len(loop._granted)


def num_slots_out(side: Side) -> int:
    """Staging slots that are not home, those that ops of dead links still hold included. 0 when idle."""
    with side._lock:
        return sum(slots_out(worker.loop) for worker in side.links._workers if not worker.finished)


def peer_states(side: Side) -> dict[str, str]:
    """Each peer: refused, silent, linked, linking, or unlinked."""
    with side._lock:
        return {peer_id: _state(side, peer) for peer_id, peer in side.peers._peers.items()}


def _state(side: Side, peer: Peer[object]) -> str:
    if peer.refused is not None:
        return "refused"
    if peer.silent:
        return "silent"
    worker = side.links.worker(peer.peer_id)
    if worker is None:
        return "unlinked"
    return "linked" if worker.live else "linking"
