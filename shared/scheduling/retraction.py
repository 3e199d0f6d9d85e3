"""The retracted requests of a node: how they give their KV up, and when they come back.

`victims` says which request is retracted and what becomes of its KV. What makes this right:

- A launched forward may still write the victim's newest token. Nothing of that is copied or shared: only the
  committed tokens are, and what the forward samples is dropped (`Req.generation`). The token that is dropped will
  be drawn again identically, since a sample depends on seed and position alone.
- A copy is queued on the forward stream, behind every forward launched before it and ahead of all later ones. So
  it finds the committed tokens complete, and pages that a victim gave up may go to the next forward at once. For
  transfers, which write from outside the stream, a copy is an epoch of its own in `PageAllocator`, announced here
  when it is decided on: the pages cool until it is done. Host pages are touched by the stream alone, so a plan may
  hand them on at once.
- The whole committed KV is copied, also what the RadixCache shares: nothing stays locked on the device for a
  retracted request. What the tree still has when the request resumes is not copied back.
- KV that comes back counts as committed when the copy has landed, not when it is decided on: the RadixCache never
  learns of a page before its content is right. Until then the host pages are kept, and serve again should the
  request be retracted meanwhile.
- A request that is being moved to another node is held: a transfer reads its pages, so it is not retracted. When no
  other is left and all wait in place, its move is given up, and it can be retracted when the transfer has ended.
- Below a watermark of free pages, the next victim is named as one that had better be moved, if that costs least. It
  runs on. If no move begins, it is retracted like any other when pages are short.
- Some request always goes on. The last running request is never retracted for want of pages (only preempted, by one
  of far higher priority, which then runs). None resumes unless all that run can take their next step. Retracted
  requests resume first come first served (within a level, where priorities count), and one that got no further since
  it was last retracted keeps its place in that order, and the length of its wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from shared import log
from shared.config import ScheduleOptions
from shared.kvcache.allocator import PageCopy
from shared.kvcache.ledger import KVLedger, ReqKV, Room
from shared.protocol.messages import ReqKey
from shared.scheduling.plan import KVCopy
from shared.scheduling.req import Req
from shared.scheduling.schedule_policy import PriorityRule
from shared.scheduling.victims import RetractMode, Victims
from shared.timeline import ReqStage


@dataclass(frozen=True, slots=True)
class RetractionCounts:
    """`num_retracted` requests wait now; the others count events. `num_waits` counts steps that requests sat out."""

    num_retracted: int = 0
    num_host: int = 0
    num_recompute: int = 0
    num_waits: int = 0


class Retraction:
    """The retracted requests of one node, and every decision about them. Decides only; nothing is copied here."""

    def __init__(self, ledger: KVLedger, options: ScheduleOptions, priority: PriorityRule) -> None:
        self._ledger = ledger
        self._victims = Victims(ledger, options, priority)
        self.costs = self._victims.costs
        self._wait_steps = options.retracted_wait_steps
        self._reserved_tokens = options.num_reserved_decode_tokens
        self._priority = priority
        self._queue: dict[Req, None] = {}
        """Retracted requests, in the order in which they resume. Those with `host_pages` are copied back."""
        self._sitting_out: dict[Req, None] = {}
        self.held: dict[Req, None] = {}
        """Requests that a transfer reads."""
        self._given_up: list[ReqKey] = []
        self._move_wanted: list[ReqKey] = []
        self._named: dict[Req, int] = {}
        """Requests that had better be moved, and the forward at which each was named, which is done once."""
        self._copies: list[KVCopy] = []
        self._unservable: list[ReqKey] = []
        self._num_forwards = 0
        self._refused_at: tuple[Req, Room, int] | None = None
        self._num_host = self._num_recompute = self._num_waits = 0

    # ------------------------------------------------------------------------------------------- turns
    def begin_turn(self, num_forwards: int) -> None:
        """Begin a decision, before which `num_forwards` were decided on, and put the queue in order."""
        self._num_forwards = num_forwards
        in_order = sorted(self._queue, key=lambda req: (-self._level(req), req.stalled_since))
        self._queue = dict.fromkeys(in_order)

    def end_turn(self) -> tuple[tuple[KVCopy, ...], *tuple[tuple[ReqKey, ...], ...]]:
        """Return what was decided besides the forward: the other fields of the Plan, in their order."""
        copies, self._copies = tuple(self._copies), []
        unservable, self._unservable = tuple(self._unservable), []
        given_up, self._given_up = tuple(self._given_up), []
        move_wanted, self._move_wanted = tuple(self._move_wanted), []
        return copies, unservable, given_up, move_wanted

    @property
    def count(self) -> RetractionCounts:
        """The counts so far, for the load that the node publishes."""
        return RetractionCounts(self.num_retracted, self._num_host, self._num_recompute, self._num_waits)

    @property
    def num_retracted(self) -> int:
        """Requests that are retracted now."""
        return len(self._queue)

    @property
    def num_retractions(self) -> int:
        """How often a request gave its KV up."""
        return self._num_host + self._num_recompute

    # ------------------------------------------------------------------------------------- coming back
    @property
    def waits(self) -> bool:
        """True while any request is retracted."""
        return bool(self._queue)

    def to_prefill(self) -> list[Req]:
        """Requests that may be prefilled again now, in order: none passes an older one whose KV is on the host."""
        return list(takewhile(lambda req: not req.host_pages, self._queue))

    def admissible(self, arrivals: Sequence[Req]) -> list[Req]:
        """Those of `arrivals` that may take room: all, unless a retracted or stalled request has waited too long.

        Then only arrivals of a higher level than every such request may.
        """
        due = [
            self._level(other)
            for other in (*self._queue, *self._sitting_out)
            if self._num_forwards - other.stalled_since >= self._wait_steps
        ]
        return [req for req in arrivals if self._level(req) > max(due)] if due else list(arrivals)

    def resume(self, running: Sequence[Req], waiting: Sequence[Req]) -> list[Req]:
        """Bring requests back from the host, first come first served, as long as they fit; they run from now on.

        A waiting request of a higher level goes first.
        """
        resumed: list[Req] = []
        for req in list(takewhile(lambda req: req.host_pages, self._queue)):
            outranked = any(self._level(other) > self._level(req) for other in waiting)
            if outranked or not self._resume(req, [*running, *resumed]):
                break
            del self._queue[req]
            resumed.append(req)
        return resumed

    def _resume(self, req: Req, running: Sequence[Req]) -> bool:
        ledger = self._ledger
        seen = (req, ledger.available, len(running))
        if ledger.rows.num_free == 0 or seen == self._refused_at:
            return False
        others = [*running, req] if running else []
        num_steps = self.num_missing_pages(running)
        spare = ledger.growth(
            (len(other.ids) for other in others),
            [min(self._reserved_tokens, other.num_wanted) for other in others],
        )
        with ledger.tentative(ledger.match_prefix(req.ids, req.extra_key), req.extra_key) as tentative:
            kv = tentative.kv
            assert kv is not None, "a row was free a moment ago"
            ledger.slide(kv, len(req.ids) - 1)
            num_pages = ledger.pages_for(len(req.ids))
            missing = Room(num_pages - kv.num_pages, max(num_pages - max(kv.num_pages, kv.window_from), 0))
            needed = missing + spare + Room(num_steps, num_steps)
            if not ledger.available.holds(needed) or not ledger.grow(kv, len(req.ids)):
                self._refused_at = seen
                return False
            req.kv = tentative.keep()
        self._copy_back(req, kv)
        req.timeline.move_to(ReqStage.DECODING)
        log.event("resume", **req.fields, output_len=req.output_len, cached_pages=kv.num_tree_pages)
        return True

    def _copy_back(self, req: Req, kv: ReqKV) -> None:
        kv.kv_allocated_len = len(req.ids) - 1
        first, last = kv.num_tree_pages, self._ledger.pages_for(kv.kv_allocated_len)
        if first == last:
            kv.kv_committed_len = kv.kv_allocated_len
            self._free_host_pages(req)
            return
        pages = self._ledger.rows.read(kv.row, first, last)
        windows = self._ledger.window_pages_of(pages)
        copy = PageCopy(False, tuple(pages), tuple(req.host_pages[first:last]), windows)
        self._launch_later(KVCopy(req, req.num_retractions, copy, kv.kv_allocated_len))

    def copied(self, copy: KVCopy, seconds: float) -> None:
        """Account for a copy that has landed. Its request may have ended, or been retracted again."""
        self.costs.observe_copy(len(copy.pages.host_pages), seconds)
        req = copy.req
        if not copy.pages.to_host and req.kv is not None and req.num_retractions == copy.num_retractions:
            # A decode step may have been committed since.
            req.kv.kv_committed_len = max(req.kv.kv_committed_len, copy.kv_len)
            self._free_host_pages(req)

    # --------------------------------------------------------------------------------------- leaving
    def make_room(self, running: list[Req], num_coming_pages: int) -> list[Req]:
        """Take requests out of `running` until the others can take their next step; returns those that sit it out.

        `num_coming_pages` come home with the forward in flight: while no more are missing, no KV is given up.
        """
        self._sitting_out = {}
        ledger = self._ledger
        lack = self.num_missing_pages(running) - ledger.num_available_pages
        if lack > 0:
            self._set_unservable_apart(running)
            lack = self.num_missing_pages(running) - ledger.num_available_pages
        sits_out: list[Req] = []
        while lack > 0 and len(running) > 1 and lack > num_coming_pages:
            victim = self._in_order(running)[0]
            if victim in self.held:  # and so are all others
                sits_out = self._choose_to_sit_out(running, lack)
                self._given_up = [victim.key] if len(sits_out) == len(running) else []
                break
            mode = self._victims.mode_of(victim)
            if mode is RetractMode.WAIT:
                sits_out = self._choose_to_sit_out(running, lack)
                if len(sits_out) < len(running):
                    break
                sits_out, mode = [], RetractMode.RECOMPUTE
            running.remove(victim)
            self.retract(victim, mode)
            lack = self.num_missing_pages(running) - ledger.num_available_pages
        else:
            sits_out = self._choose_to_sit_out(running, lack)
        for req in sits_out:
            self._stall(req)
        self._num_waits += len(sits_out)
        self._sitting_out = dict.fromkeys(sits_out)
        return sits_out

    def want_move(self, running: Sequence[Req]) -> None:
        """Name the next victim as one to be moved, if free pages are below the watermark and that costs least.

        The watermark is the room that is kept for running requests before an arrival gets pages. The next one is
        named when the last one has left, or has been moved nowhere for as long as a retracted request waits.
        """
        if len(running) < 2 or self.held:
            return
        nums_more = [self._reserved_tokens] * len(running)
        watermark = self._ledger.growth((len(req.ids) for req in running), nums_more)
        if self._ledger.available.holds(watermark):
            return
        if any(self._num_forwards - named_at < self._wait_steps for named_at in self._named.values()):
            return
        victim = next((req for req in self._in_order(running) if req not in self._named), None)
        if victim is not None and self._victims.is_cheaper_to_move(victim):
            self._named[victim] = self._num_forwards
            self._move_wanted = [victim.key]

    def next_forced_victim(self, running: Sequence[Req]) -> Req | None:
        """The next victim of the test knob, among those that got further since they were last retracted."""
        further = [req for req in running if req.output_len > req.stalled_output_len]
        return next(iter(self._in_order(further)), None)

    def retract_now(self, req: Req) -> None:
        """Release the KV of a running request, in the way that costs least; its pages are wanted at once."""
        mode = self._victims.mode_of(req)
        self.retract(req, RetractMode.RECOMPUTE if mode is RetractMode.WAIT else mode)

    def retract(self, req: Req, mode: RetractMode) -> None:
        """Release the KV of a running request, and queue it. What the RadixCache keeps of the KV is evictable."""
        assert req.kv is not None
        if mode is RetractMode.HOST:
            self._num_host += 1
            if not req.host_pages:
                self._copy_out(req, req.kv)
        else:
            assert not req.host_pages
            self._num_recompute += 1
        freed = self._ledger.cache_finished_req(req.kv, req.ids)
        req.kv = None
        req.drop_results_in_flight()
        req.num_retractions += 1
        req.timeline.move_to(ReqStage.RETRACTED)
        self._stall(req)
        self._queue[req] = None
        on_host = len(req.host_pages)
        log.event("retract", **req.fields, output_len=req.output_len, freed_pages=freed, host_pages=on_host)

    def remove(self, req: Req) -> None:
        """Forget a request that ended, or that is prefilled again. Its host pages are given back."""
        self._queue.pop(req, None)
        self._sitting_out.pop(req, None)
        self._named.pop(req, None)
        self._free_host_pages(req)

    def num_missing_pages(self, running: Sequence[Req]) -> int:
        """Pages that the next step of all of `running` needs beyond those they hold."""
        return sum(map(self._missing, running))

    # ------------------------------------------------------------------------------------------ inside
    def _missing(self, req: Req) -> int:
        # One that was moved here has spare pages, which no other request can take.
        return max(self._pages_after_step(req) - req.kv.num_pages, 0) if req.kv is not None else 0

    def _pages_after_step(self, req: Req) -> int:
        known, after = len(req.ids), req.kv_len + 1
        return self._ledger.pages_for(known if known > after else after)  # after a jump, more are known

    def _in_order(self, running: Sequence[Req]) -> list[Req]:
        """The next victim first; those that are held come last."""
        in_order = self._victims.in_order(running, self._num_forwards)
        return sorted(in_order, key=self.held.__contains__) if self.held else in_order

    def _level(self, req: Req) -> int:
        return self._priority.level(req, self._num_forwards)

    def _choose_to_sit_out(self, running: Sequence[Req], lack: int) -> list[Req]:
        """Of the requests that need a page, as few as will do, in the order of victims."""
        sits_out: list[Req] = []
        for req in self._in_order(running) if lack > 0 else ():
            if lack > 0 and self._missing(req):
                sits_out.append(req)
                lack -= self._missing(req)
        return sits_out

    def _set_unservable_apart(self, running: list[Req]) -> None:
        total = self._ledger.allocator.num_pages
        unservable = [req for req in running if self._pages_after_step(req) > total]
        for req in unservable:
            running.remove(req)
        self._unservable += [req.key for req in unservable]

    def _stall(self, req: Req) -> None:
        if req.stalled_output_len != req.output_len:
            req.stalled_output_len, req.stalled_since = req.output_len, self._num_forwards

    def _copy_out(self, req: Req, kv: ReqKV) -> None:
        num_pages = self._ledger.pages_for(kv.kv_committed_len)
        host_pages = self._ledger.host.alloc(num_pages)
        assert host_pages is not None and kv.kv_committed_len == len(req.ids) - 1, (
            "`Victims.mode_of` has looked"
        )
        req.host_pages = host_pages
        pages = self._ledger.rows.read(kv.row, 0, num_pages)
        copy = PageCopy(True, tuple(pages), tuple(host_pages), self._ledger.window_pages_of(pages))
        self._launch_later(KVCopy(req, req.num_retractions, copy, kv.kv_committed_len))

    def _launch_later(self, copy: KVCopy) -> None:
        self._ledger.forward_launched()  # pages given up from now on cool until the copy is done
        self._copies.append(copy)

    def _free_host_pages(self, req: Req) -> None:
        self._ledger.host.free(req.host_pages)
        req.host_pages = []
