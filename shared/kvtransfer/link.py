"""What the transfer needs from a data path: a Link (one pair, one direction, one incarnation) and its factory.

A link carries messages from rank SENDER (the sending node) to rank RECEIVER (the receiving node). The receiver
alone decides their order: it posts the receive of message `seq`, then sends the Grant that names `seq`. Lengths
come only from the Grant: on gloo a send that is longer than its receive aborts the receiver's process, and a
shorter one leaves a stale tail.

The owner of the memory of a message:

| | sending: a slot of the sender's ring | receiving |
| --- | --- | --- |
| gloo, tcp, nccl, fake | the op, until it has left | a slot of the receiver's ring, the arrival's until `release` |
| shm, cuda-ipc | the op, until the receiver has released it | the same slot, mapped: readable until `release` |

How the header of a message travels: on gloo and tcp before the payload, in one message; on shm and cuda-ipc in the
record on the link's socket; on nccl over the control connection.

Threads step the links of `transports`; the fake network of the tests steps links under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shared.kvtransfer.staging import Slot, SlotRing

if TYPE_CHECKING:
    from shared.kvtransfer.link_store import LinkStore
    from shared.protocol.transfer_messages import Place

RECEIVER, SENDER = 0, 1


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """One link to build: `name` is never used twice, `secret` keys the challenge that both ends must pass.

    `ring` has the staging slots of this end, all free while the link is built and again when it is closed.
    """

    name: str
    rank: int
    secret: bytes
    store: LinkStore
    ring: SlotRing


class Op(Protocol):
    """A send or receive under way. It owns its memory until `wait` returned True or raised."""

    def wait(self, *, block: bool) -> bool:
        """Whether the op has finished. LinkError: it failed, and the link is dead; asked again, it says so again."""
        ...


class Arrival(Op, Protocol):
    """A receive. It says where its message lies, and holds that memory until it is released."""

    @property
    def header(self) -> bytes:
        """The header that was sent with the message, once `wait` has returned True."""
        ...

    @property
    def slot(self) -> Slot:
        """Where the payload lies (not to be written), from `wait` having returned True until `release`."""
        ...

    def release(self) -> None:
        """The message is not read any more; called once `wait` returned True or raised. LinkError: as for `wait`."""
        ...


class Link(Protocol):
    """One end. Its worker calls `send` from its copier, and everything else from the data thread."""

    @property
    def max_arrivals(self) -> int:
        """How many arrivals may be unreleased."""
        ...

    def send(self, slot: Slot, nbytes: int, seq: int, header: bytes) -> Op:
        """Start sending the first `nbytes` of `slot`, one of its ring, as message `seq`.

        The payload is there: no stream has work left on the slot. The `header` of HEADER_NBYTES goes with it. Raises
        LinkError, or its Op does, if it cannot be started.
        """
        ...

    def recv(self, nbytes: int, seq: int) -> Arrival:
        """Start receiving message `seq` with a payload of exactly `nbytes`. Raises LinkError, as `send` does."""
        ...

    def abort(self) -> None:
        """Make pending ops fail within milliseconds, and later ones at once. Any thread; blocks for about as long.

        An op that failed for the host, by its timeout, may use its memory until the link is aborted. A dead link is
        aborted before that memory is freed. May be called again.
        """
        ...

    def close(self) -> None:
        """End the link's own threads and let go of its descriptors and memory. Every op has left by now."""
        ...


class Stepped(Protocol):
    """A link in steps: a thread calls `step(block=True)` until `finished`, the fake network `step(block=False)`."""

    @property
    def finished(self) -> bool:
        """No further step will do anything."""
        ...

    def step(self, *, block: bool) -> bool:
        """Do one piece of work; with `block`, wait for one. Returns whether anything was done."""
        ...


class Copier(Protocol):
    """Gathers pages into the slots of one link, beside the data thread, so that gathering hides behind sending.

    Runs copies one at a time, in the order of their submission. A copy does not raise.
    """

    def submit(self, copy: Callable[[], None], /) -> Any:
        """Have `copy` run. Any thread; must not block."""
        ...

    def shutdown(self, wait: bool = True) -> None:
        """Nothing more will be submitted."""
        ...


class LinkRunner(Protocol):
    """Steps the links of a node and copies for them: `ThreadRunner`, or the fake network."""

    def drive(self, name: str, link: Stepped) -> Callable[[float], bool]:
        """Have `link` stepped until it is finished. Must not block.

        What it returns waits for that, for so many seconds at most; False if the link is not finished then.
        """
        ...

    def new_copier(self, name: str) -> Copier:
        """Make the copier of one link."""
        ...


class LinkFactory(Protocol):
    """A transport: how links are built, and which memory they send from."""

    def obstacle(self, ours: Place, theirs: Place) -> str | None:
        """Why no link can be built between this node and another one; None: it may be."""
        ...

    def new_slot(self, nbytes: int) -> Slot:
        """Staging memory to send from. Called on the thread that is the first to use it."""
        ...

    def build(self, spec: LinkSpec, on_dead: Callable[[str], None], *, block: bool) -> Link | None:
        """Build a link with the peer that builds the same name; with `block`, wait until it is there.

        `on_dead(reason)` is called, from any thread, as soon as the peer is known to be gone, also while no
        op is under way. Raises LinkError: the peer did not come in time, or failed the challenge.
        """
        ...
