"""A live node, as the router sees it: its hello, its latest load, and the prefixes that it caches."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from typing import NamedTuple, TypeVar

import msgspec

from shared.protocol.messages import CacheEvents, Load, NodeHello, ReqReport, RouterToNode

MAX_FIGURE = 1e18
ASK_AFTER_PONGS = 2
MAX_PONGS_BEFORE_ASKING = 64
"""Pongs in a row that announce more events than have come, before a reset is asked for. The number doubles each time
that no reset comes, since a node in a long step answers pings, but not this."""

_Told = TypeVar("_Told", Load, ReqReport)


class Loss(StrEnum):
    """How the connection to a node ended."""

    LEFT = "left"
    """The node said that it leaves, its process ended without an error, or it was removed."""
    BROKEN = "broken"
    """The node was silent or hung, or cannot be reached."""
    CRASHED = "crashed"
    """The process of the node seems to have ended by an error, of which a request may be the cause."""


class Numerics(NamedTuple):
    """What decided about the bits of a sequence: `KVLayout.numerics` of the node that computed its prompt, and of the
    one that computed its output."""

    prompt: str
    output: str


class PrefixIndex:
    """The block hashes of one node's RadixCache, by its cache events. The index is empty while events are missing.

    A prefix may be evicted before a request arrives, so the node checks the prefix for which it was chosen.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._seq: int | None = None
        self._num_pongs_behind = 0
        self._patience = ASK_AFTER_PONGS

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def apply(self, events: CacheEvents) -> bool:
        """Apply events in the order of their arrival. False if some are missing: the caller asks for a reset."""
        if events.reset:
            self._blocks = set(events.stored)
        elif self._seq is None:
            return True  # a reset has been asked for
        elif events.seq != self._seq + 1:
            self._forget()
            return False
        else:
            self._blocks.difference_update(events.removed)
            self._blocks.update(events.stored)
        self._seq, self._num_pongs_behind, self._patience = events.seq, 0, ASK_AFTER_PONGS
        return True

    def compare(self, seq: int | None) -> bool:
        """Compare with the last `seq` that the node's Pong announces. False as in `apply`.

        This finds lost events that no others follow, and a reset that was lost.
        """
        if seq is None or (self._seq is not None and self._seq >= seq):
            self._num_pongs_behind = 0
            return True
        self._num_pongs_behind += 1
        if self._num_pongs_behind < self._patience:
            return True
        self._forget()
        self._patience = min(2 * self._patience, MAX_PONGS_BEFORE_ASKING)
        return False

    def num_blocks(self, hashes: Sequence[int], at_least: int = 0) -> int:
        """How many blocks from the start of a sequence the node holds; 0 if they are fewer than `at_least`.

        A node that holds a block holds those before it, so the first `at_least` blocks are one lookup.
        """
        if at_least and hashes[at_least - 1] not in self._blocks:
            return 0
        for at in range(at_least, len(hashes)):
            if hashes[at] not in self._blocks:
                return at
        return len(hashes)

    def _forget(self) -> None:
        self._blocks.clear()
        self._seq = None
        self._num_pongs_behind = 0


class Node:
    """A node from its hello until its connection is lost. Real: `live_node.LiveNode`."""

    def __init__(self, hello: NodeHello) -> None:
        self.hello = hello
        self.ref, self.role, self.limits = hello.node, hello.role, hello.limits
        self.version = hello.version
        """It is sent no message with a later `since_version`."""
        self.numerics = hello.layout.numerics
        """Equal on two nodes that compute the same bits by the same forward."""
        self.is_exact = hello.is_exact
        """Whether it computes a token to the same bits by any forward."""
        self.page_size = hello.layout.page_size
        self.kv_nbytes_per_token = hello.layout.nbytes_per_token
        self.prefixes = PrefixIndex()
        self._load = Load()

    @property
    def load(self) -> Load:
        """What its latest Pong said."""
        return self._load

    def send(self, message: RouterToNode) -> None:
        """Queue a message. Never blocks or raises: a node that cannot be sent to is lost, and reported as such."""
        raise NotImplementedError


def believed(told: _Told) -> tuple[_Told, dict[str, float]]:
    """What a node has `told`, with 0 for each figure below 0, above MAX_FIGURE or not a number; and those figures.

    A wrong figure must neither fail a request nor decide where requests go.
    """
    wrong = {
        name: figure
        for name in _names_of_figures(type(told))
        if not 0 <= (figure := getattr(told, name)) <= MAX_FIGURE
    }
    return (msgspec.structs.replace(told, **dict.fromkeys(wrong, 0)) if wrong else told), wrong


@cache
def _names_of_figures(kind: type[Load] | type[ReqReport]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type in (int, float))
