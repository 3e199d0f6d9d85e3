"""One link from its opening until its last op has left.

    BUILDING ──▶ LIVE ──▶ dead: DRAINING ──▶ finished
       └──────────────────────▲

A link's death is decided in one place (`Side.end_link`), which calls `stop`; the worker itself only reports. It then
aborts the link and stays until every op under way has left. Until then those ops own their staging slots, while the
next incarnation is already being built beside it. The abort comes before a slot is let go of: an op that has timed
out for the host may still read or write the slot on a GPU.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from shared import log
from shared.errors import LinkError
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.link import RECEIVER, Link, LinkSpec
from shared.kvtransfer.link_store import LinkStore
from shared.kvtransfer.staging import SlotRing
from shared.protocol.messages import LinkReport
from shared.protocol.transfer_messages import LinkOpen, StoreSet

if TYPE_CHECKING:
    from shared.kvtransfer.side import Side


class LinkWorker(ABC):
    """Owns one link; stepped by a thread of its own, or by the fake network. All but `step` may come from any thread.

    A SendWorker is at the sending node, a ReceiveWorker at the receiving node.
    """

    rank: ClassVar[int]

    def __init__(self, own: Endpoint, peer_id: str, opening: LinkOpen, owner: Side[Any, Any, Any]) -> None:
        options, transports = own.options, own.transports

        def tell(entry: str, value: bytes) -> None:
            own.outbox.send(peer_id, StoreSet(opening.link, entry, value))

        self.peer_id = peer_id
        self.name = opening.link
        self.transport = opening.transport
        self.death: str | None = None
        """Why the link died; None while it builds or lives."""
        self.live_at: float | None = None
        self.carries: bool | None = None
        """Whether a chunk has arrived intact; None: none was asked for yet. Only the receiving node knows."""
        self.finished = False
        self._own = own
        self._passed_over = opening.passed_over
        """Better transports, and why the link does not use them."""
        self._owner = owner
        self._factory = transports.factories[opening.transport]
        self._ring = SlotRing(options.num_slots, transports.slot_nbytes, self._factory.new_slot)
        self.store = LinkStore(tell, options.build_timeout_s)
        self._spec = LinkSpec(
            name=opening.link, rank=self.rank, secret=opening.secret, store=self.store, ring=self._ring
        )
        self._kicked = threading.Event()
        """There may be work. Cleared by the thread that steps the link."""
        self._link: Link | None = None
        self._aborted = False
        self._join: Callable[[float], bool] | None = None

    # ------------------------------------------------------------------ what the two kinds do differently
    @abstractmethod
    def _move(self, link: Link, *, block: bool) -> bool:
        """Do one piece of work of a live link; with `block`, wait for one. LinkError: the link fails."""

    @abstractmethod
    def _drain(self, *, block: bool) -> bool:
        """Wait for the ops of a link that was aborted to leave; True when none is left, and every slot is back."""

    # ------------------------------------------------------------------------------------------- any thread
    @property
    def live(self) -> bool:
        """Built, and not dead."""
        return self.live_at is not None and self.death is None

    @property
    def report(self) -> LinkReport:
        """What routers are told of a live link."""
        return LinkReport(self.peer_id, self.rank == RECEIVER, self.transport, self._passed_over)

    def start(self) -> None:
        """Begin to build."""
        self._join = self._own.transports.runner.drive(self.name, self)

    def stop(self, reason: str) -> None:
        """End the link, which is dead. Only `Side.end_link` calls this, once; it does not block."""
        assert self.death is None
        self.death = reason
        self.store.abort(reason)
        self._kicked.set()

    def abort_ops(self) -> None:
        """Free the worker from an op that it waits for; blocks briefly."""
        if (link := self._link) is not None:
            link.abort()

    def join(self, timeout_s: float) -> bool:
        """Wait until the worker is finished."""
        return self._join is None or self._join(timeout_s)

    # ------------------------------------------------------------------------------- the thread of the link
    def step(self, *, block: bool) -> bool:
        """Do one piece of work: build, move a chunk, or abort a dead link and wait for its ops to leave."""
        try:
            if self.death is None:
                if self._link is None:
                    return self._build(block=block)
                self._kicked.clear()
                return self._move(self._link, block=block)
        except LinkError as error:
            self._owner.end_link(self, str(error))
            return True
        except Exception as error:  # a defect in this package or in a page store must not take the node down
            log.crash("link_defect", link=self.name)
            self._owner.end_link(self, f"{type(error).__name__}: {error}")
            return True
        if self._link is not None and not self._aborted:
            self._aborted = True
            self._link.abort()
        if not self._drain(block=block):
            return False
        self._ring.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        self.finished = True
        return True

    def _build(self, *, block: bool) -> bool:
        self._link = self._factory.build(self._spec, self._on_peer_gone, block=block)
        if self._link is None:
            return False
        self.live_at = self._own.clock()
        passed_over: dict[str, Any] = {f"not_{name}": why for name, why in self._passed_over.items()}
        log.event("link_up", link=self.name, transport=self.transport, **passed_over)
        return True

    def _on_peer_gone(self, reason: str) -> None:
        self._owner.end_link(self, reason)
