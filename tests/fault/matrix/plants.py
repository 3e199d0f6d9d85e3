"""Faults that a test plants into a running node, so that the matrix must find them.

A plant takes the place of one method of the node. It acts while the node's order names it; otherwise the method does
what it always did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from shared.engine import collect_sampling
from shared.engine.loop_parts import NodeParts
from shared.grammar.state import GrammarState
from shared.kvcache.ledger import ReqKV
from shared.kvtransfer.layout import Chunk
from shared.protocol.messages import Cancel, Decode, Prefill, ReqKey
from shared.protocol.router_port import FromRouter
from shared.protocol.transfer_messages import Handoff
from shared.timeline import Role
from tests.fault.matrix.cells import Cell, Fault, Transport
from tests.fault.matrix.holding import Stage, hold

IsActive = Callable[[], bool]


TOKENS_DIFFER = r"^\w+: \[[\d, ]*\] != \[|^\w+: a position changed"
FAILED = "^a failover, or a failed move, though nothing has failed"


@dataclass(frozen=True)
class Plant:
    """A fault of every node in `roles`, and how the matrix finds it.

    `finding` is a pattern of what the matrix says, `logged` one of what the fleet logs meanwhile: a fault that is
    found by another check, or beside another event, counts as missed.
    """

    name: str
    roles: tuple[Role, ...]
    plant: Callable[[NodeParts, IsActive], None]
    finding: str = TOKENS_DIFFER
    logged: str = ""
    cell: Cell | None = None
    """The cell that fails. None: the fault shows in every request, so that no other one is needed."""
    lasts: bool = False
    """Whether the fleet has to be started anew behind it."""


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
                    buffer[:, :, pages] = 3
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
    uniforms = collect_sampling.uniforms

    def faulty(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        return uniforms(seeds, [position + is_active() for position in positions])

    hold(collect_sampling, "uniforms", faulty)


def grammar_not_replayed(parts: NodeParts, is_active: IsActive) -> None:
    """The grammar of a request that failed over starts from its beginning: it goes on behind what it did not see."""
    follow = GrammarState.follow

    def faulty(state: GrammarState, ids: Sequence[int], start: int) -> bool:
        num_known = len(ids) - start
        if is_active() and state._num_accepted == 0 and num_known > 1:  # more than a handoff brings
            state._num_accepted = num_known
        return follow(state, ids, start)

    hold(GrammarState, "follow", faulty)


def lost_cancel(parts: NodeParts, is_active: IsActive) -> None:
    """The scheduler does not get a Cancel that has come."""
    take = parts.router_port.take

    def faulty() -> list[FromRouter]:
        return [heard for heard in take() if not (is_active() and isinstance(heard.message, Cancel))]

    hold(parts.router_port, "take", faulty)


def position_forgotten(parts: NodeParts, is_active: IsActive) -> None:
    """A stream that failed over is computed again from its first token; the router drops what its client has."""
    take = parts.router_port.take

    def faulty() -> list[FromRouter]:
        heard = take()
        for at, one in enumerate(heard):
            if is_active() and isinstance(one.message, Prefill | Decode):
                work = msgspec.structs.replace(one.message.work, output_ids=())
                heard[at] = replace(one, message=msgspec.structs.replace(one.message, work=work))
        return heard

    hold(parts.router_port, "take", faulty)


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


def stale_incarnation(parts: NodeParts, is_active: IsActive) -> None:
    """A dispatch of a router that was started again passes for one of its earlier incarnation."""
    _forget_of_keys(parts, is_active, lambda key: msgspec.structs.replace(key, router=""))


def stale_attempt(parts: NodeParts, is_active: IsActive) -> None:
    """The next attempt at a request passes for the one before."""
    _forget_of_keys(parts, is_active, lambda key: msgspec.structs.replace(key, attempt=0))


def _forget_of_keys(parts: NodeParts, is_active: IsActive, forget: Callable[[ReqKey], ReqKey]) -> None:
    """What `forget` leaves of a key decides whether a dispatch is a repeated one."""
    port = parts.router_port
    is_new = port._is_new
    seen: set[tuple[ReqKey, bool]] = set()

    def faulty(key: ReqKey, *, sends: bool) -> bool:
        less = forget(key), sends
        known = less in seen
        seen.add(less)
        if is_active() and known:
            port._dispatch_repeated(key=key)
            return False
        return is_new(key, sends=sends)

    hold(port, "_is_new", faulty)


def cached_before_computed(parts: NodeParts, is_active: IsActive) -> None:
    """All pages of a request that ends are cached, also those that never arrived."""
    ledger = parts.engine.ledger
    finished = ledger.cache_finished_req

    def faulty(kv: ReqKV, ids: Sequence[int], *, evict_first: bool = False) -> int:
        if is_active():
            kv.kv_committed_len = min(len(ids), kv.num_pages * ledger.page_size)
        return finished(kv, ids, evict_first=evict_first)

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


def moved_pages_given_away(parts: NodeParts, is_active: IsActive) -> None:
    """The pages of a move belong to another request once they are offered, not once the move is done."""
    sender, buffer = parts.transfer.sender, parts.engine.pool.buffer_LSNHPD
    offer = sender.offer

    def faulty(key: ReqKey, page_ids: Sequence[int]) -> None:
        if is_active():
            buffer[:, :, list(page_ids)] = 0
        offer(key, page_ids)

    hold(sender, "offer", faulty)


def token_sent_twice(parts: NodeParts, is_active: IsActive) -> None:
    """Each token is told as two."""
    say_token = parts.router_port.say_token

    def faulty(key: ReqKey, position: int, token_ids: tuple[int, ...], *rest: Any) -> None:
        say_token(key, position, token_ids * 2 if is_active() else token_ids, *rest)

    hold(parts.router_port, "say_token", faulty)


_P, _D = (Role.PREFILL,), (Role.DECODE,)
_BOTH = (Role.PREFILL, Role.DECODE)


def _cell(fault: Fault, stage: Stage) -> Cell:
    return Cell(fault, stage, Transport.SHM)


PLANTS = {
    plant.name: plant
    for plant in (
        Plant("a page not sent", _P, page_not_sent, FAILED, "corrupt_pages"),
        Plant("a page index off by one", _P, page_index_off_by_one),
        Plant(
            "a late write into the pages of another request",
            _D,
            late_write,
            cell=_cell(Fault.NONE, Stage.HANDED_OFF),  # else the request before may have ended
        ),
        Plant("a handoff with a stale length", _P, stale_length, FAILED, "handoff of"),
        Plant("a seed position off by one", _D, seed_position_off_by_one),
        Plant(
            "grammar state not replayed",
            _BOTH,
            grammar_not_replayed,
            finding=r"^grammar: \[[\d, ]*\] != \[",
            cell=_cell(Fault.DECODE_KILLED, Stage.STREAMING),
            lasts=True,
        ),
        Plant(
            "a lost Cancel",
            _BOTH,
            lost_cancel,
            finding="^a node went on with what its client had left",
            cell=_cell(Fault.CLIENT_GONE, Stage.STREAMING),
        ),
        Plant(
            "a stream computed again from its first token",
            _BOTH,
            position_forgotten,
            finding=r"^\d+ tokens were computed where \d+ were left",
            cell=_cell(Fault.LINK_LOST, Stage.TRANSFERRING),
        ),
        Plant(
            "a double free",
            _D,
            double_free,
            f"{TOKENS_DIFFER}|pages with two owners",
            "pages with two owners",
            lasts=True,
        ),
        Plant(
            "a stale incarnation accepted",
            _BOTH,
            stale_incarnation,
            finding="the router is ready",
            logged="dispatch_repeated",
            cell=_cell(Fault.ROUTER_KILLED, Stage.STREAMING),
            lasts=True,
        ),
        Plant(
            "a stale attempt accepted",
            _BOTH,
            stale_attempt,
            finding="^never: all calls have ended",
            logged="dispatch_repeated",
            cell=_cell(Fault.LINK_LOST, Stage.TRANSFERRING),
            lasts=True,
        ),
        Plant(
            "a page cached before it is computed",
            _D,
            cached_before_computed,
            cell=_cell(Fault.LINK_LOST, Stage.TRANSFERRING),
        ),
        Plant("a digest ignored", _BOTH, digest_ignored),
        Plant(
            "a token sent twice",
            _D,
            token_sent_twice,
            r'^\w+: .*"code": "wrong_answer"',
            "wrong_answer",
        ),
        Plant(
            "pages of a move given away",
            _D,
            moved_pages_given_away,
            cell=_cell(Fault.NONE, Stage.MOVING),
        ),
        Plant(
            "a move with a stale length",
            _D,
            stale_length,
            FAILED,
            "handoff (of|digest)",
            cell=_cell(Fault.NONE, Stage.MOVING),
        ),
    )
}


def install(role: Role, parts: NodeParts, planted: Callable[[], Sequence[str]]) -> None:
    """Put every plant of the role in its place; those that `planted` names act."""

    def is_planted(name: str) -> bool:
        return name in planted()

    for plant in PLANTS.values():
        if role in plant.roles:
            plant.plant(parts, partial(is_planted, plant.name))
