"""What happens when the running requests outgrow the KV pool: who makes room, in which way, and who comes back when.

Victims are those with the fewest output tokens, then the longest prompt, then the smallest key; where priority
counts, the lowest goes first. A victim takes one of three ways out:

    HOST        its committed KV is copied to host memory, its pages are given up; it resumes by copying back what
                the RadixCache has lost meanwhile, and goes on decoding
    RECOMPUTE   its pages are given up; it is prefilled again, where the RadixCache has not kept it
    WAIT        it keeps its KV and sits this decode step out

`--retract-policy recompute` knows no HOST. `host` knows RECOMPUTE only where nothing else helps: while the host
pool is full, requests wait in place as long as anybody can go on. `auto` takes the cheaper of HOST and RECOMPUTE
(see `RetractCosts`), and RECOMPUTE when the host pool is full. Whatever the policy, everybody waits in place when
enough pages come home with the forward that is in flight.

What makes this right:

- A launched forward may still write the victim's newest token. Nothing of that is copied or shared: only the
  committed tokens are, and what the forward samples is dropped (`Req.generation`). The token that is dropped will
  be drawn again identically, since a sample depends on seed and position alone.
- A copy is queued on the forward stream, behind every forward launched before it and ahead of all later ones. So
  it finds the committed tokens complete, and pages that a victim gave up may go to the next forward at once. For
  transfers, which write from outside the stream, a copy is an epoch of its own in `PageAllocator`, announced here,
  when it is decided on: the pages cool until it is done. Host pages are touched by the stream alone, and so may be
  handed on as soon as the plan says so.
- The whole committed KV is copied, also what the RadixCache shares: nothing stays locked on the device for a
  request that is away. What the tree still has when it resumes is not copied back.
- KV that comes back counts as committed when the copy has landed, not when it is decided on: the RadixCache never
  learns of a page before it is right. Until then the host pages are kept, and serve again should the request be
  retracted meanwhile.
- Some request always goes on. The last running request is never retracted for want of pages (only preempted, by one
  of far higher priority, which then runs). None resumes unless all that run can take their next step. Retracted
  requests resume first come first served (within a level, where priority counts), and one that got no further since
  it was last retracted keeps its place in that order, and the length of its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from shared import log
from shared.config import ScheduleOptions
from shared.kvcache.host_pages import PageCopy
from shared.kvcache.ledger import KVLedger, ReqKV
from shared.protocol.messages import ReqKey
from shared.scheduling.priority import PriorityRule
from shared.scheduling.req import Req
from shared.scheduling.retract_costs import RetractCosts
from shared.scheduling.schedule_batch import KVCopy
from shared.timeline import ReqStage


class WayOut(Enum):
    """What becomes of a victim: see the module."""

    HOST = auto()
    RECOMPUTE = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True)
class RetractionCounts:
    """`num_retracted` wait now; the others count what happened. `num_waits` are decode steps that were sat out."""

    num_retracted: int = 0
    num_host: int = 0
    num_recompute: int = 0
    num_waits: int = 0


class Retraction:
    """The retracted requests of one node, and every decision about them. Decides only; nothing is copied here."""

    def __init__(self, ledger: KVLedger, options: ScheduleOptions, priority: PriorityRule) -> None:
        self._ledger = ledger
        self._policy = options.retract_policy
        self._wait_steps = options.retracted_wait_steps
        self._reserved_tokens = options.num_reserved_decode_tokens
        self._priority = priority
        self._queue: list[Req] = []
        """Retracted requests, in the order in which they resume. Those with `host_pages` are copied back."""
        self._sitting_out: list[Req] = []
        self._copies: list[KVCopy] = []
        self._unservable: list[ReqKey] = []
        self._num_forwards = 0
        self._refused_at: tuple[Req, int, int] | None = None
        self._num_host = self._num_recompute = self._num_waits = 0
        self.costs = RetractCosts(ledger.host.page_nbytes)

    # ------------------------------------------------------------------------------------------- turns
    def begin_turn(self, num_forwards: int) -> None:
        """A new decision begins; `num_forwards` were decided on before. Puts the queue in order."""
        self._num_forwards = num_forwards
        self._queue.sort(key=lambda req: (-self._level(req), req.stalled_since))

    def end_turn(self) -> tuple[tuple[KVCopy, ...], tuple[ReqKey, ...]]:
        """What was decided besides forwards: copies, to be launched in this order before the next forward, and
        requests that not even the empty pool could hold. Those are in no queue any more.
        """
        copies, self._copies = tuple(self._copies), []
        unservable, self._unservable = tuple(self._unservable), []
        return copies, unservable

    @property
    def count(self) -> RetractionCounts:
        """For whoever watches the node."""
        return RetractionCounts(len(self._queue), self._num_host, self._num_recompute, self._num_waits)

    # ------------------------------------------------------------------------------------- who is next
    @property
    def waits(self) -> bool:
        """True while anybody is retracted."""
        return bool(self._queue)

    def to_prefill(self) -> list[Req]:
        """Who may be prefilled again now, in order: nobody passes an older one whose KV is on the host."""
        first_on_host = next((i for i, req in enumerate(self._queue) if req.host_pages), len(self._queue))
        return self._queue[:first_on_host]

    def admissible(self, arrivals: Sequence[Req]) -> list[Req]:
        """Those of `arrivals` that may take room: all, unless a request here has waited too long for it.

        Then only those of a higher level than every request that has.
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
        while self._queue and self._queue[0].host_pages:
            req = self._queue[0]
            outranked = any(self._level(other) > self._level(req) for other in waiting)
            if outranked or not self._resume(req, [*running, *resumed]):
                break
            del self._queue[0]
            resumed.append(req)
        return resumed

    def _resume(self, req: Req, running: Sequence[Req]) -> bool:
        ledger = self._ledger
        seen = (req, ledger.num_available_pages, len(running))
        if ledger.rows.num_free == 0 or seen == self._refused_at:
            return False
        others = [*running, req] if running else []
        headroom = sum(min(self._reserved_tokens, other.num_wanted) for other in others)
        spare = self.num_missing_pages(running) + ledger.pages_for(headroom)
        with ledger.tentative(ledger.match_prefix(req.ids, req.extra_key), req.extra_key) as admission:
            kv = admission.kv
            assert kv is not None, "a row was free a moment ago"
            missing = ledger.pages_for(len(req.ids)) - kv.num_pages
            if missing + spare > ledger.num_available_pages or not ledger.grow(kv, len(req.ids)):
                self._refused_at = seen
                return False
            req.kv = admission.keep()
        self._copy_back(req, kv)
        req.timeline.move_to(ReqStage.DECODING)
        log.event("resume", key=req.key, output_len=req.output_len, cached_pages=kv.num_tree_pages)
        return True

    def _copy_back(self, req: Req, kv: ReqKV) -> None:
        kv.kv_allocated_len = len(req.ids) - 1
        first, last = kv.num_tree_pages, self._ledger.pages_for(kv.kv_allocated_len)
        if first == last:
            kv.kv_committed_len = kv.kv_allocated_len
            self._free_host_pages(req)
            return
        pages = self._ledger.rows.read(kv.row, first, last)
        copy = PageCopy(False, tuple(pages), tuple(req.host_pages[first:last]))
        self._launch_later(KVCopy(req, req.num_retractions, copy, kv.kv_allocated_len))

    def copied(self, copy: KVCopy, seconds: float) -> None:
        """A copy has landed. Its request may have ended, or been retracted again."""
        self.costs.observe_copy(len(copy.pages.host_pages), seconds)
        req = copy.req
        if not copy.pages.to_host and req.kv is not None and req.num_retractions == copy.num_retractions:
            # A decode step may have been committed since.
            req.kv.kv_committed_len = max(req.kv.kv_committed_len, copy.kv_len)
            self._free_host_pages(req)

    # --------------------------------------------------------------------------------------- who leaves
    def make_room(self, running: list[Req], num_coming_pages: int) -> list[Req]:
        """Take requests out of `running` until the others can take their next step; returns those who sit it out.

        `num_coming_pages` come home with the forward in flight: for so few nobody gives anything up.
        """
        self._sitting_out = []
        ledger = self._ledger
        lack = self.num_missing_pages(running) - ledger.num_available_pages
        if lack > 0:
            self._set_unservable_apart(running)
            lack = self.num_missing_pages(running) - ledger.num_available_pages
        sits_out: list[Req] = []
        while lack > 0 and len(running) > 1 and lack > num_coming_pages:
            victim = self.next_victim(running)
            way = self.way_out(victim)
            if way is WayOut.WAIT:
                sits_out = self._who_sits_out(running, lack)
                if len(sits_out) < len(running):
                    break
                sits_out, way = [], WayOut.RECOMPUTE
            running.remove(victim)
            self.retract(victim, way)
            lack = self.num_missing_pages(running) - ledger.num_available_pages
        else:
            sits_out = self._who_sits_out(running, lack)
        for req in sits_out:
            self._stall(req)
        self._num_waits += len(sits_out)
        self._sitting_out = sits_out
        return sits_out

    def next_victim(self, running: Sequence[Req]) -> Req:
        """Fewest output tokens first: least is lost. Then the longest prompt, then the key, for a fixed order."""
        return min(running, key=self._victim_key)

    def next_forced_victim(self, running: Sequence[Req]) -> Req | None:
        """The same for the test knob, among those who got further since they were last retracted."""
        return min(
            (req for req in running if req.output_len > req.stalled_output_len),
            key=self._victim_key,
            default=None,
        )

    def way_out(self, victim: Req) -> WayOut:
        """The way out that the policy prefers for `victim`, who runs."""
        if victim.host_pages:
            return WayOut.HOST  # not landed yet since it was last retracted: the host has it all
        kv, ledger = victim.kv, self._ledger
        assert kv is not None
        num_pages = ledger.pages_for(len(victim.ids) - 1)
        has_room = num_pages <= ledger.host.num_free
        if self._policy == "recompute" or (self._policy == "auto" and not has_room):
            return WayOut.RECOMPUTE
        if self._policy == "auto":
            num_shared = kv.num_pages - ledger.num_pages_released_by([kv])  # others keep those here
            lost_tokens = len(victim.ids) - num_shared * ledger.page_size
            if self.costs.recompute_s(lost_tokens) <= self.costs.host_s(num_pages, num_pages - num_shared):
                return WayOut.RECOMPUTE
        is_whole = kv.kv_committed_len == len(victim.ids) - 1
        return (
            WayOut.HOST if has_room and is_whole else WayOut.WAIT
        )  # its prefill may be committed one step later

    def retract(self, req: Req, way: WayOut) -> None:
        """Release the KV of a running request (what the RadixCache keeps of it is evictable) and queue it.

        One that would wait gives its KV up too: the pages are wanted now.
        """
        assert req.kv is not None
        if way is WayOut.HOST:
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
        self._queue.append(req)
        on_host = len(req.host_pages)
        log.event("retract", key=req.key, output_len=req.output_len, freed_pages=freed, host_pages=on_host)

    def remove(self, req: Req) -> None:
        """Forget a request that ended, or that is prefilled again. Its host pages are given back."""
        self._queue = [other for other in self._queue if other is not req]
        self._sitting_out = [other for other in self._sitting_out if other is not req]
        self._free_host_pages(req)

    def num_missing_pages(self, running: Sequence[Req]) -> int:
        """Pages that the next step of all of `running` needs beyond those they hold."""
        return sum(map(self._missing, running))

    # ------------------------------------------------------------------------------------------ inside
    def _missing(self, req: Req) -> int:
        return self._pages_after_step(req) - req.kv.num_pages if req.kv is not None else 0

    def _pages_after_step(self, req: Req) -> int:
        known, after = len(req.ids), req.kv_len + 1
        return self._ledger.pages_for(known if known > after else after)  # after a jump, more are known

    def _level(self, req: Req) -> int:
        return self._priority.level(req, self._num_forwards)

    @property
    def _victim_key(self) -> Callable[[Req], tuple[int, int, int, str]]:
        level = self._level if self._priority.enabled else lambda req: 0
        return lambda req: (level(req), req.output_len, -req.num_input_ids, str(req.key))

    def _who_sits_out(self, running: Sequence[Req], lack: int) -> list[Req]:
        """Of those who need a page, as few as will do, in the order of victims."""
        sits_out: list[Req] = []
        for req in sorted(running, key=self._victim_key) if lack > 0 else ():
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
        assert host_pages is not None and kv.kv_committed_len == len(req.ids) - 1, "way_out has looked"
        req.host_pages = host_pages
        pages = self._ledger.rows.read(kv.row, 0, num_pages)
        copy = PageCopy(True, tuple(pages), tuple(host_pages))
        self._launch_later(KVCopy(req, req.num_retractions, copy, kv.kv_committed_len))

    def _launch_later(self, copy: KVCopy) -> None:
        self._ledger.allocator.forward_launched()  # pages given up from now on cool until the copy is done
        self._copies.append(copy)

    def _free_host_pages(self, req: Req) -> None:
        self._ledger.host.free(req.host_pages)
        req.host_pages = []
