"""Faults that a test plants into a running node, so that the matrix must find them.

A plant takes the place of one method of the node. It acts while the node's order names it; otherwise the method does
what it always did.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from shared.engine import sampling_inputs
from shared.engine.node_process import NodeParts
from shared.grammar.state import GrammarState
from shared.kvcache.ledger import ReqKV
from shared.kvtransfer.layout import Chunk
from shared.protocol.messages import Cancel, ReqKey, RouterToNode
from shared.protocol.transfer_messages import Handoff
from shared.timeline import Role
from tests.fault.matrix.cells import Cell, Fault, Transport
from tests.fault.matrix.holding import Stage, hold

IsActive = Callable[[], bool]


@dataclass(frozen=True)
class Plant:
    """A fault of every node in `roles`, and the cell that finds it."""

    name: str
    roles: tuple[Role, ...]
    fault: Fault
    stage: Stage
    plant: Callable[[NodeParts, IsActive], None]
    at_start: bool = False
    """Whether the nodes are started with it."""

    @property
    def cell(self) -> Cell:
        """The cell that must fail."""
        return Cell(self.fault, self.stage, Transport.SHM)


def page_not_sent(parts: NodeParts, is_active: IsActive) -> None:
    """The first bytes of each message stay what they were."""
    gather = parts.engine.pool.gather

    def faulty(page_ids: Sequence[int], first: int, num: int, payload: torch.Tensor, *seed: int) -> Any:
        digest = gather(page_ids, first, num, payload, *seed)
        if is_active():
            payload[: payload.numel() // 2].zero_()
        return digest

    hold(parts.engine.pool, "gather", faulty)


def page_index_off_by_one(parts: NodeParts, is_active: IsActive) -> None:
    """Each page is read from its neighbour's place."""
    gather = parts.engine.pool.gather

    def faulty(page_ids: Sequence[int], *rest: Any) -> Any:
        return gather([page - is_active() for page in page_ids], *rest)

    hold(parts.engine.pool, "gather", faulty)


def late_write(parts: NodeParts, is_active: IsActive) -> None:
    """With each message, the pages of the last one of another request are written again, whosever they are."""
    receiver, buffer = parts.transfer.receiver, parts.engine.pool.buffer_LSNHPD
    begin_scatter = receiver.begin_scatter
    last: list[tuple[ReqKey, list[int]]] = []

    def faulty(key: ReqKey, chunk: Chunk) -> list[int] | None:
        page_ids = begin_scatter(key, chunk)
        if is_active():
            for other, pages in last:
                if other != key:
                    buffer[:, :, pages] = 0
        if page_ids is not None:
            last[:] = [(key, page_ids)]
        return page_ids

    hold(receiver, "begin_scatter", faulty)


def stale_length(parts: NodeParts, is_active: IsActive) -> None:
    """A handoff tells one token of KV less than there is."""
    handoff = parts.transfer.sender.handoff

    def faulty(key: ReqKey, message: Handoff) -> None:
        handoff(key, msgspec.structs.replace(message, kv_len=message.kv_len - is_active()))

    hold(parts.transfer.sender, "handoff", faulty)


def seed_position_off_by_one(parts: NodeParts, is_active: IsActive) -> None:
    """The randomness of a position is that of the next one."""
    uniform = sampling_inputs.uniform
    hold(sampling_inputs, "uniform", lambda seed, position: uniform(seed, position + is_active()))


def grammar_not_replayed(parts: NodeParts, is_active: IsActive) -> None:
    """The grammar of a request that was elsewhere before starts from its beginning."""
    follow = GrammarState.follow

    def faulty(state: GrammarState, ids: Sequence[int], start: int) -> bool:
        return True if is_active() and len(ids) > start else follow(state, ids, start)

    hold(GrammarState, "follow", faulty)


def lost_cancel(parts: NodeParts, is_active: IsActive) -> None:
    """No Cancel arrives."""
    on_message = parts.router_port.on_message

    def faulty(router: str, message: RouterToNode) -> None:
        if not (is_active() and isinstance(message, Cancel)):
            on_message(router, message)

    hold(parts.router_port, "on_message", faulty)


def double_free(parts: NodeParts, is_active: IsActive) -> None:
    """Pages are freed twice."""
    allocator = parts.engine.ledger.allocator
    free = allocator.free

    def faulty(page_ids: Sequence[int]) -> None:
        pages = list(page_ids)
        free(pages)
        if is_active():
            free(pages)

    hold(allocator, "free", faulty)


STALE_INCARNATION = "a stale incarnation accepted"


def stale_incarnation(parts: NodeParts, is_active: IsActive) -> None:
    """A node that was started again has the incarnation of the one that was killed, so every check lets it pass.

    It was named by `name_as_before`, before it had parts.
    """
    assert not is_active() or parts.router_port.hello.node.incarnation.endswith(_SAME)


_SAME = "0" * 8


def name_as_before(planted: Sequence[str]) -> None:
    """Plant `STALE_INCARNATION`, if it is planted, before the node gets its name."""
    if STALE_INCARNATION in planted:
        hold(secrets, "token_hex", lambda num_bytes: _SAME)


def cached_before_computed(parts: NodeParts, is_active: IsActive) -> None:
    """All pages of a request that ends are cached, also those that it never computed."""
    ledger = parts.engine.ledger
    finished = ledger.cache_finished_req

    def faulty(kv: ReqKV, ids: Sequence[int]) -> int:
        if is_active():
            kv.kv_committed_len = min(len(ids), kv.num_pages * ledger.page_size)
        return finished(kv, ids)

    hold(ledger, "cache_finished_req", faulty)


class _Matches:
    """Equal to every digest."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def digest_ignored(parts: NodeParts, is_active: IsActive) -> None:
    """Half of each message is never written, and what arrives is not compared with its digest."""
    page_not_sent(parts, is_active)
    scatter = parts.engine.pool.scatter

    def faulty(*arguments: Any) -> Any:
        digest = scatter(*arguments)
        return _Matches() if is_active() else digest

    hold(parts.engine.pool, "scatter", faulty)


def token_sent_twice(parts: NodeParts, is_active: IsActive) -> None:
    """Each token is told as two."""
    say_token = parts.router_port.say_token

    def faulty(key: ReqKey, position: int, token_ids: tuple[int, ...], *rest: Any) -> None:
        say_token(key, position, token_ids * 2 if is_active() else token_ids, *rest)

    hold(parts.router_port, "say_token", faulty)


_P, _D = (Role.PREFILL,), (Role.DECODE,)
_BOTH = (Role.PREFILL, Role.DECODE)
_ANY = (Fault.LINK_LOST, Stage.STREAMING)
"""The cheapest cell. What goes wrong in every request needs no other."""

PLANTS = {
    plant.name: plant
    for plant in (
        Plant("a page not sent", _P, *_ANY, page_not_sent),
        Plant("a page index off by one", _P, *_ANY, page_index_off_by_one),
        Plant("a late write into a freed page", _D, *_ANY, late_write),
        Plant("a handoff with a stale length", _P, *_ANY, stale_length),
        Plant("a seed position off by one", _D, *_ANY, seed_position_off_by_one),
        Plant(
            "grammar state not replayed", _BOTH, Fault.DECODE_KILLED, Stage.STREAMING, grammar_not_replayed
        ),
        Plant("a lost Cancel", _D, Fault.LINK_LOST, Stage.ABORTING, lost_cancel),
        Plant("a double free", _D, *_ANY, double_free),
        Plant(STALE_INCARNATION, _D, Fault.DECODE_KILLED, Stage.STREAMING, stale_incarnation, True),
        Plant(
            "a page cached before it is computed",
            _P,
            Fault.DECODE_KILLED,
            Stage.PREFILLING,
            cached_before_computed,
        ),
        Plant("a digest ignored", _BOTH, *_ANY, digest_ignored),
        Plant("a token sent twice", _D, *_ANY, token_sent_twice),
    )
}


def install(role: Role, parts: NodeParts, planted: Callable[[], Sequence[str]]) -> None:
    """Put every plant of the role in its place; those that `planted` names act."""

    def is_planted(name: str) -> bool:
        return name in planted()

    for plant in PLANTS.values():
        if role in plant.roles:
            plant.plant(parts, partial(is_planted, plant.name))
