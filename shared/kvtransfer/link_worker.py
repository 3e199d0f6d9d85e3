"""One link from its opening until its last op has left.

    BUILDING ──▶ LIVE ──▶ dead: DRAINING ──▶ finished
       └──────────────────────▲

A link's death is decided in one place (`Links.fail`), which calls `stop`; the worker itself only reports. It then
aborts the link and stays until every op under way has left. Until then those ops own their staging slots, while the
next incarnation is already being built beside it. The abort comes before the loop lets go of a slot: an op that has
timed out for the host may still read or write the slot on a GPU.

An end that fails a challenge or a rehearsal reports why. Its peer may see the link end before it has that report, so
it waits for it, a short while, before it says that the peer is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from shared import log
from shared.errors import LinkError, PeerGone
from shared.kvtransfer.link import Driver, Link, LinkFactory, LinkRate, LinkSpec, Rehearse
from shared.kvtransfer.pace import Pace


class LinkLoop(Protocol):
    """What a link is for: `SendLoop` or `ReceiveLoop`. All but `kick` belong to the thread that steps it."""

    def attach(self, link: Link, pace: Pace | None) -> None:
        """Take the link, which is built, and its `pace` if it was rehearsed. Called once, before the first `step`."""
        ...

    def kick(self) -> None:
        """Look for work again. Any thread."""
        ...

    def step(self, *, block: bool) -> bool:
        """Do one piece of work; with `block`, wait for one. Raises LinkError."""
        ...

    def drain(self, *, block: bool) -> bool:
        """Wait for the ops of a link that was aborted to leave; True when none is left, nor anything else of it."""
        ...


class LinkWorker:
    """Owns one link; stepped by a thread of its own, or by the fake network."""

    def __init__(
        self,
        *,
        spec: LinkSpec,
        peer_id: str,
        transport: str,
        loop: LinkLoop,
        factory: LinkFactory,
        rehearse: Rehearse | None,
        passed_over: dict[str, str],
        clock: Callable[[], float],
        report_dead: Callable[[LinkWorker, str], None],
        peer_report_s: float,
    ) -> None:
        """`peer_report_s` bounds the wait for the peer's report of why a link ended that is being built."""
        self.peer_id = peer_id
        self.name = spec.name
        self.transport = transport
        self.passed_over = passed_over
        """Better transports, and why the link does not use them."""
        self.rate: LinkRate | None = None
        """What its rehearsal has measured."""
        self.pace: Pace | None = None
        self.store = spec.store
        self.loop = loop
        self.death: str | None = None
        """Why the link died; None while it builds or lives."""
        self.live_at: float | None = None
        self.finished = False
        self._spec = spec
        self._factory = factory
        self._rehearse = rehearse
        self._clock = clock
        self._report_dead = report_dead
        self._peer_report_s = peer_report_s
        self._stopped = threading.Event()
        self._link: Link | None = None
        self._aborted = False
        self._driver: Driver | None = None
        self._peer_gone: str | None = None
        """What the link itself has noticed of its peer's end."""

    @property
    def live(self) -> bool:
        """Built, and not dead."""
        return self.live_at is not None and self.death is None

    def start(self) -> None:
        """Begin to build."""
        self._driver = self._factory.drive(self.name, self)

    def stop(self, reason: str) -> None:
        """End the link, which is dead. Only `Links.fail` calls this, once; it does not block."""
        assert self.death is None
        self.death = reason
        self._stopped.set()
        self.store.abort(reason)
        self.loop.kick()

    def abort_ops(self) -> None:
        """Free the worker from an op that it waits for. Any thread; blocks briefly."""
        if (link := self._link) is not None:
            link.abort()

    def join(self, timeout_s: float) -> bool:
        """Wait until the worker is finished."""
        return self._driver is None or self._driver.join(timeout_s)

    def step(self, *, block: bool) -> bool:
        """Do one piece of work: build, move a chunk, or abort a dead link and wait for its ops to leave."""
        try:
            if self.death is None:
                if self._link is None:
                    return self._build(block=block)
                return self.loop.step(block=block)
        except LinkError as error:
            self._report_dead(self, str(error))
            return True
        except Exception as error:  # a defect in this package or in a page store must not take the node down
            log.crash("link_defect", link=self.name)
            self._report_dead(self, f"{type(error).__name__}: {error}")
            return True
        if self._link is not None and not self._aborted:
            self._aborted = True
            self._link.abort()
        if not self.loop.drain(block=block):
            return False
        if self._link is not None:
            self._link.close()
            self._link = None
        self.finished = True
        return True

    def _build(self, *, block: bool) -> bool:
        try:
            self._link = self._factory.build(self._spec, self._on_peer_gone, block=block)
        except PeerGone:
            self._await_peer_report()
            raise
        if self._link is None:
            return False
        if self._rehearse is not None:
            self.rate = self._rehearse(self._link, self._spec, self._fail_rehearsal)
            self.pace = Pace(self.name, self.transport, self.rate, self._clock)
        self.loop.attach(self._link, self.pace)
        self.live_at = self._clock()
        if self._peer_gone is not None:
            raise LinkError(self._peer_gone)
        fields: dict[str, Any] = {"link": self.name, "transport": self.transport}
        if self.rate is not None:
            fields |= {"gb_s": round(self.rate.gb_s, 4), "latency_ms": round(self.rate.latency_ms, 3)}
        fields |= {f"not_{name}": why for name, why in self.passed_over.items()}
        log.event("link_up", **fields)
        return True

    def _fail_rehearsal(self, reason: str) -> None:
        """An op has failed, perhaps since the peer has aborted the link."""
        self._await_peer_report()
        self._report_dead(self, reason)

    def _await_peer_report(self) -> None:
        """Let the peer's report end the link, which is being built. The fake network rehearses no link."""
        self._stopped.wait(self._peer_report_s)

    def _on_peer_gone(self, reason: str) -> None:
        self._peer_gone = reason  # before the look at `live_at`, as the other thread writes before it looks
        if self.live_at is None:
            # The thread that builds the link reports why it failed, which may be why the peer is gone.
            self._await_peer_report()
            self.store.abort(reason)
        else:
            self._report_dead(self, reason)
