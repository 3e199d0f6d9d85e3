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

from shared.engine import model_worker_batch
from shared.engine.loop_parts import NodeParts
from shared.grammar.state import GrammarState
from shared.kvcache.ledger import ReqKV
from shared.kvcache.pools import TokenToKVPool
from shared.kvcache.windowed_pool import AnyKVPool, WindowedKVPool
from shared.kvtransfer.staging import Chunk
from shared.protocol.messages import Cancel, Decode, Prefill, ReqKey, TokenEntry
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
    of_windows: bool = False
    """Whether it acts where layers with windows have pages of their own, and nowhere else."""


def groups(pool: AnyKVPool) -> tuple[TokenToKVPool, ...]:
    """The pool of each group of layers."""
    return (pool.full, pool.window) if isinstance(pool, WindowedKVPool) else (pool,)


def overwrite(pool: AnyKVPool, page_ids: Sequence[int], first_layer: int, num_layers: int) -> None:
    """Fill pages of layers of one group with 3.0, which has the same bytes in bfloat16, in float32 and in scales."""
    nbytes = pool.gather_nbytes(len(page_ids), num_layers)
    pool.scatter(page_ids, first_layer, num_layers, torch.full((nbytes,), 0x40, dtype=torch.uint8))


def page_not_sent(parts: NodeParts, is_active: IsActive) -> None:
    """The first bytes of each message stay what they were."""
    for pool in groups(parts.engine.pool):

        def faulty(*arguments: Any, gather: Callable[..., Any] = pool.gather) -> Any:
            digest, payload = gather(*arguments), arguments[3]
            if is_active():
                payload[: payload.numel() // 2].zero_()
            return digest

        hold(pool, "gather", faulty)


def page_index_off_by_one(parts: NodeParts, is_active: IsActive) -> None:
    """Each page is read from its neighbour's place."""
    for pool in groups(parts.engine.pool):

        def faulty(page_ids: Sequence[int], *rest: Any, gather: Callable[..., Any] = pool.gather) -> Any:
            return gather([page - is_active() for page in page_ids], *rest)

        hold(pool, "gather", faulty)


def late_write(parts: NodeParts, is_active: IsActive) -> None:
    """With each message, the pages of the last one of another request are written again, whosever they are."""
    receiver, pool = parts.transfer.receiver, parts.engine.pool
    begin_scatter = receiver.begin_scatter
    last: list[tuple[ReqKey, Chunk, list[int]]] = []

    def faulty(key: ReqKey, chunk: Chunk) -> list[int] | None:
        page_ids = begin_scatter(key, chunk)
        if is_active():
            for other, late, pages in last:
                if other != key:
                    overwrite(pool, pages, late.first_layer, late.num_layers)
        if page_ids is not None:
            last[:] = [(key, chunk, page_ids)]
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
    uniforms = model_worker_batch.uniforms

    def faulty(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        return uniforms(seeds, [position + is_active() for position in positions])

    hold(model_worker_batch, "uniforms", faulty)


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
    for pool in groups(parts.engine.pool):

        def faulty(*arguments: Any, scatter: Callable[..., Any] = pool.scatter) -> Any:
            digest = scatter(*arguments)
            return _Matches() if is_active() else digest

        hold(pool, "scatter", faulty)


def moved_pages_given_away(parts: NodeParts, is_active: IsActive) -> None:
    """The pages of a move belong to another request once they are offered, not once the move is done."""
    sender, offer = parts.transfer.sender, parts.transfer.sender.offer

    def faulty(key: ReqKey, *page_ids: Sequence[int]) -> None:
        for pool, of_group in zip(groups(parts.engine.pool), page_ids, strict=False):
            if is_active():
                overwrite(pool, of_group, 0, pool.num_layers)
        offer(key, *page_ids)

    hold(sender, "offer", faulty)


def window_page_of_the_other_table(parts: NodeParts, is_active: IsActive) -> None:
    """What arrives for layers with windows is written to the window pages that have the numbers of the pages."""
    num_full, receiver = groups(parts.engine.pool)[0].num_layers, parts.transfer.receiver
    begin_scatter = receiver.begin_scatter

    def faulty(key: ReqKey, chunk: Chunk) -> list[int] | None:
        page_ids, transfer = begin_scatter(key, chunk), receiver.transfers.get(key)
        if page_ids is None or transfer is None or not is_active() or chunk.first_layer < num_full:
            return page_ids
        first = chunk.first_page - transfer.prefix_pages
        return transfer.page_ids[first : first + chunk.num_pages]

    hold(receiver, "begin_scatter", faulty)


def views_of_different_length(parts: NodeParts, is_active: IsActive) -> None:
    """What arrives for layers with windows is written to the buffer of the others, in pages counted as its own."""
    pool = parts.engine.pool
    if not isinstance(pool, WindowedKVPool):
        return
    window, full_bytes = pool.window, pool.full._pages_RPN.view(-1)
    scatter = window.scatter

    def faulty(
        page_ids: Sequence[int], first: int, num: int, payload: torch.Tensor, seed: int | None = None
    ) -> int:
        if not is_active():
            return scatter(page_ids, first, num, payload, seed)
        view_RPN = full_bytes[: window.nbytes].view(window._pages_RPN.shape)
        return window.mover.scatter(view_RPN, range(2 * first, 2 * (first + num)), page_ids, payload, seed)

    hold(window, "scatter", faulty)


def window_page_freed_early(parts: NodeParts, is_active: IsActive) -> None:
    """A window slides as if the last page were full: its first page goes before the step that sees it last."""
    ledger = parts.engine.ledger
    slide = ledger.slide

    def faulty(kv: ReqKV, num_tokens: int | None = None) -> None:
        end = kv.kv_committed_len if num_tokens is None else num_tokens
        slide(kv, ledger.pages_for(end) * ledger.page_size if is_active() else num_tokens)

    hold(ledger, "slide", faulty)


def token_sent_twice(parts: NodeParts, is_active: IsActive) -> None:
    """Each token is told as two."""
    say_tokens = parts.router_port.say_tokens

    def faulty(entry: TokenEntry) -> None:
        say_tokens(msgspec.structs.replace(entry, token_ids=entry.token_ids * 2) if is_active() else entry)

    hold(parts.router_port, "say_tokens", faulty)


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
            f"{TOKENS_DIFFER}|pages with two owners|has no window page",
            "pages with two owners|has no window page",  # the first of two owners has given it up
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
        Plant(
            "a window page written through the table of the other layers",
            _D,
            window_page_of_the_other_table,
            of_windows=True,
        ),
        Plant("views of different length over one buffer", _D, views_of_different_length, of_windows=True),
        Plant(
            "a window page freed one step early",
            _D,
            window_page_freed_early,
            finding=rf"{TOKENS_DIFFER}|^n2: .* != ",  # logprobs, at least
            of_windows=True,
        ),
        # The last: a router that heard it from a node may move nothing there for 10 s.
        Plant(
            "a token sent twice",
            _D,
            token_sent_twice,
            r'^\w+: .*"code": "wrong_answer"',
            "wrong_answer",
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
