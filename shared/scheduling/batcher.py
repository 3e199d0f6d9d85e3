"""Chooses what the next forward computes: prefill first, else one decode step of everything that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.config import ScheduleOptions
from shared.kvcache.ledger import KVLedger
from shared.scheduling.commit import Outcome
from shared.scheduling.plan import Plan, ScheduleBatch, num_behind, schedule, schedule_step
from shared.scheduling.prefill_adder import AddReqResult, NewTokenRatio, PrefillAdder
from shared.scheduling.req import Req
from shared.scheduling.retraction import Retraction
from shared.scheduling.schedule_policy import (
    Arrival,
    CachedPrefixes,
    InBatchPrefix,
    PriorityRule,
    SchedulePolicy,
)
from shared.timeline import ReqStage


class Batcher:
    """The scheduler of one node, for both roles. It only decides: `plan` returns what the `Launcher` runs.

    Every live request that holds a place is in exactly one of `waiting_queue`, `chunked_req`, `last_batch` (an
    extend whose requests have not been merged yet), `running_batch` and the queue of `retraction`. On a prefill
    node a request wants one token, so it never reaches `running_batch`.
    """

    def __init__(self, ledger: KVLedger, options: ScheduleOptions) -> None:
        self._ledger = ledger
        self._options = options
        self._priority = PriorityRule(options)
        self._cached = CachedPrefixes(ledger)
        self.policy = SchedulePolicy(options, ledger, self._priority, self._cached)
        self._in_batch_prefix = InBatchPrefix(ledger, options, self._priority, self._cached)
        self._prefills_in_flight: list[Req] = []
        self._blocked_arrival: Req | None = None
        self._lacks_room = False
        """Slots or pages were too few when requests of the waiting queue were last offered to the PrefillAdder."""
        self._num_arrivals = 0
        self.num_steps = 0
        """Forwards decided on so far: the clock of everything that depends on time here."""
        self._new_token_ratio = NewTokenRatio(options.schedule_conservativeness)
        self._num_decode_steps = 0
        self.waiting_queue: dict[Req, None] = {}
        """In order of arrival. Thousands may wait and end at once, so `remove` must not search for each."""
        self.chunked_req: Req | None = None
        self.last_batch: ScheduleBatch | None = None
        self.running_batch: list[Req] = []
        self.retraction = Retraction(ledger, options, self._priority)
        self._leaving: list[Req] = []
        """Requests whose last token is in flight: their pages come home with it."""

    # ------------------------------------------------------------------------------------------- plan
    def plan(self, arrival: Arrival | None = None) -> Plan:
        """Decide on the next forward. The plan is without a batch if there is nothing to compute, or no page yet.

        `arrival` is the request of the prealloc queue that found no room. Until it has room, waiting requests that
        rank below it get none.
        """
        arrivals = [arrival.req] if arrival is not None else []
        self._blocked_arrival = arrival.req if arrival is not None else None
        if arrival is not None:
            self._preempt_for_arrival(arrival)
        self._settle_last_batch()
        self.retraction.begin_turn(self.num_steps)
        self.running_batch += self.retraction.resume(self.running_batch, [*self.waiting_queue, *arrivals])
        self.last_batch = self._next_prefill_batch() or self._next_decode_batch()
        self.num_steps += self.last_batch is not None
        return Plan(self.last_batch, *self.retraction.end_turn())

    def observe(self, outcome: Outcome) -> None:
        """Take in the copies of KV that have landed, and the measured speed of prefills and copies."""
        for copy, seconds in outcome.copied:
            self.retraction.copied(copy, seconds)
        if outcome.prefilled is not None:
            self.retraction.costs.prefill.observe(*outcome.prefilled)

    def _settle_last_batch(self) -> None:
        self._prefills_in_flight = []
        if self.last_batch is not None and self.last_batch.is_extend:
            self._prefills_in_flight = [item.req for item in self.last_batch.extends if item.is_in_flight]
            self.running_batch += [
                item.req
                for item in self.last_batch.extends
                if item.req is not self.chunked_req and not item.is_stale
            ]
        leaving = [*self._leaving, *(req for req in self.running_batch if not req.wants_decode)]
        self._leaving = [req for req in leaving if req.finish is None and req.kv is not None]
        self.running_batch = [req for req in self.running_batch if req.wants_decode]
        self.last_batch = None

    def _next_prefill_batch(self) -> ScheduleBatch | None:
        if self.chunked_req is None and not self.waiting_queue and not self.retraction.waits:
            return None
        adder = PrefillAdder(
            self._ledger,
            self._cached,
            self._options,
            self.running_batch,
            self._new_token_ratio.value,
            num_decodes=sum(map(num_behind, self.running_batch)) if self._options.enable_mixed_chunk else 0,
        )
        result = AddReqResult.CONTINUE
        if self.chunked_req is not None:
            result = adder.add_chunked_req(self.chunked_req)
        retracted = set(self.retraction.to_prefill())
        offers = result is AddReqResult.CONTINUE
        passed: Req | None = None
        for req in self._offered(adder) if offers else ():
            if self._may_not_pass(req, passed, adder.chunked_req):
                break
            was_retracted = req.timeline.stage is ReqStage.RETRACTED
            if was_retracted and req not in retracted:
                continue  # an older one did not fit
            result = adder.add_one_req(req)
            if result is AddReqResult.TOO_LONG:
                passed = req
                if was_retracted:
                    retracted.clear()
                continue
            if result is not AddReqResult.CONTINUE and self._preempt_for(req, adder):
                result = adder.add_one_req(req)
            if result is AddReqResult.NO_TOKEN and was_retracted:
                retracted.clear()  # retracted requests behind it wait; others may pass, until `admissible` ends that
            elif result is not AddReqResult.CONTINUE:
                break
        if offers:
            self._lacks_room = result is AddReqResult.NO_TOKEN or adder.lacks_room
        if not adder.can_run:
            return None
        adder.fill_chunk()
        self.chunked_req = adder.chunked_req
        for req in adder.can_run:
            self.waiting_queue.pop(req, None)
            self.retraction.remove(req)
            if req.timeline.stage is not ReqStage.PREFILLING:
                req.timeline.move_to(ReqStage.PREFILLING)
        extends = [schedule(r, r.extend_len, samples=r is not self.chunked_req) for r in adder.can_run]
        beside = self._step_beside_prefill()
        return ScheduleBatch((*extends, *beside.extends), beside.decodes, beside.future_writes)

    def _may_not_pass(self, req: Req, passed: Req | None, chunked: Req | None) -> bool:
        """Whether `req` would be computed beside `chunked`, or before `passed`, which waits, and counts less than it.

        The age of `chunked` does not count: it has its share of each forward.
        """
        if passed is not None and self.level(req) < self.level(passed):
            return True
        return chunked is not None and self._priority.given(req) < self._priority.given(chunked)

    def _step_beside_prefill(self) -> ScheduleBatch:
        """With mixed chunks, a decode step of all running requests, unless that would take a retraction.

        Piggybacked decodes of Sarathi-Serve (Agrawal et al. 2024): a long prompt does not stall the streams.
        """
        running = self.running_batch
        if not (self._options.enable_mixed_chunk and running):
            return ScheduleBatch()
        if self.retraction.num_missing_pages(running) > self._ledger.num_available_pages:
            return ScheduleBatch()
        return self._step(running)

    def _offered(self, adder: PrefillAdder) -> Iterator[Req]:
        """The waiting requests in the order of the policy; none when the batch is full for every one of them.

        A request that waits for a prefix (`InBatchPrefix`) is left out. That is decided when its turn comes, since
        the requests admitted before it compute prefixes too.
        """
        retracted = self.retraction.to_prefill()
        waiting = self.retraction.admissible(list(self.waiting_queue))
        arrival = self._blocked_arrival
        if arrival is not None:  # pages that are free, or freed for it, are not for lower ranks
            level, rank = self.level(arrival), self.rank(arrival)
            retracted = [req for req in retracted if self.level(req) >= level]
            waiting = [req for req in waiting if self.rank(req) < rank]
        waiting = [*retracted, *waiting]
        running = self.running_batch
        if adder.is_full and not self._priority.may_preempt_any(waiting, running, self.num_steps):
            return
        in_flight = self._prefills_in_flight
        being_computed = [*in_flight, *([self.chunked_req] if self.chunked_req else [])]
        for req in self.policy.order(waiting, running, being_computed, self.num_steps):
            leaders = (*in_flight, *adder.can_run)
            num_shared = self._in_batch_prefix.shared_tokens(req, leaders, self.num_steps)
            if not num_shared:
                yield req
            elif not adder.keep_room_for(req, num_shared):
                return

    def _preempt_for(self, req: Req, adder: PrefillAdder) -> bool:
        """Retract running requests that count far less than `req`, if that makes room for it."""
        if req.kv is not None:
            return False  # it was admitted: a token budget ended the round
        victims = self._priority.victims_for(req, self._retractable, adder.would_fit, self.num_steps)
        for victim in victims:
            adder.forget(victim)
            self._retract(victim)
        return bool(victims)

    def first_blocked(self) -> Req | None:
        """The waiting request that ranks first, while the waiting queue lacks room: lower arrivals get none."""
        return next(iter(self.in_order(list(self.waiting_queue))), None) if self._lacks_room else None

    def is_open_to(self, arrival: Req, blocked: Req | None) -> bool:
        """Whether `arrival` may reserve room for a transfer, `blocked` being the result of `first_blocked`.

        It may not while a retracted request has waited too long.
        """
        ranks_first = blocked is None or self.rank(arrival) < self.rank(blocked)
        return ranks_first and bool(self.retraction.admissible([arrival]))

    def is_open_to_move(self, moving: Req, blocked: Req | None) -> bool:
        """As `is_open_to`, for a request that runs elsewhere: it also lets every retracted request go before it."""
        return self.is_open_to(moving, blocked) and not self.retraction.waits

    def _preempt_for_arrival(self, arrival: Arrival) -> None:
        """Retract running requests that count far less than `arrival`, if that makes room for it.

        Only with priority scheduling. The pages of the victims cool before the arrival can have them.
        """
        if not self._priority.enabled or not self.is_open_to(arrival.req, self.first_blocked()):
            return
        if not arrival.would_fit(arrival.req, ()):
            running, would_fit = self._retractable, arrival.would_fit
            for victim in self._priority.victims_for(arrival.req, running, would_fit, self.num_steps):
                self._retract(victim)

    @property
    def schedule_policy(self) -> str:
        """The policy in effect: the configured one, or `fcfs` where that cannot be had or would cost too much now."""
        return self.policy.acts_as(len(self.waiting_queue))

    def level(self, req: Req) -> int:
        """The level of `req` now (`PriorityRule.level`)."""
        return self._priority.level(req, self.num_steps)

    def in_order(self, reqs: Sequence[Req]) -> Sequence[Req]:
        """`reqs`, which are in order of arrival, by rank."""
        return self._priority.in_order(reqs, self.num_steps)

    def rank(self, req: Req) -> tuple[int, bool, int]:
        """The place of `req` in the one order over all queues (`PriorityRule.rank`)."""
        return self._priority.rank(req, self.num_steps)

    def _next_decode_batch(self) -> ScheduleBatch | None:
        stepping = self._retract_decode()
        if not stepping:
            if not (self.running_batch or self.waiting_queue or self.retraction.waits):
                self._new_token_ratio.reset()
            return None  # nothing runs, or every request waits for pages that cool or are in transfer
        return self._step(stepping)

    def _step(self, reqs: Sequence[Req]) -> ScheduleBatch:
        """A decode step of `reqs`; there are pages for it."""
        self._num_decode_steps += 1
        self._new_token_ratio.decay()
        batch = schedule_step(reqs, self._ledger, max(self._options.chunk_tokens // 2, 1))
        if batch.extends:  # `_settle_last_batch` brings their requests back, as those of every extend
            gone = {id(item.req) for item in batch.extends}
            self.running_batch = [req for req in self.running_batch if id(req) not in gone]
        return batch

    # ---------------------------------------------------------------------------------------- retract
    def _retract_decode(self) -> list[Req]:
        """SGLang's retract_decode: retract requests until the others fit one more step. Returns those that take it.

        No prompt is half computed now: a `chunked_req` holds the pages of its whole prompt and goes first.
        """
        every, before = self._options.retract_every, self.num_retractions
        forced = every > 0 and self._num_decode_steps % every == every - 1
        victim = self.retraction.next_forced_victim(self._retractable) if forced else None
        if victim is not None:
            self._num_decode_steps += 1
            self._retract(victim)
            before += 1
        coming = [req.kv for req in self._leaving if req.kv is not None]
        num_coming_pages = self._ledger.num_pages_released_by(coming)
        sits_out = self.retraction.make_room(self.running_batch, num_coming_pages)
        self.retraction.want_move(self.running_batch)
        if self.num_retractions > before:
            self._new_token_ratio.rise_after_retraction(self.running_batch)
        return [req for req in self.running_batch if req not in sits_out] if sits_out else self.running_batch

    @property
    def _retractable(self) -> list[Req]:
        held = self.retraction.held
        return [req for req in self.running_batch if req not in held] if held else self.running_batch

    def _retract(self, req: Req) -> None:
        """Retract a running request now, in the way that costs least."""
        self.running_batch.remove(req)
        self.retraction.retract_now(req)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their prefill, or for the rest of it; retracted ones are counted with them."""
        return len(self.waiting_queue) + self.retraction.num_retracted + (self.chunked_req is not None)

    @property
    def num_retractions(self) -> int:
        """How often a request gave its KV up."""
        return self.retraction.num_retractions

    # ----------------------------------------------------------------------------------- in and out
    def arrived(self, req: Req) -> None:
        """Begin to age `req`. The scheduler calls this for a request that first waits outside the Batcher."""
        if req.arrival_step is None:
            self._num_arrivals += 1
            req.arrival_step, req.arrival_number = self.num_steps, self._num_arrivals

    def add(self, req: Req) -> None:
        """Queue a request whose KV is to be computed here."""
        self.arrived(req)
        self.waiting_queue[req] = None

    def admit_prefilled(self, req: Req) -> None:
        """Begin to decode a request whose KV is there and whose next token is known: it was received or suspended."""
        assert req.kv is not None
        self.arrived(req)
        self.running_batch.append(req)

    def hold(self, req: Req) -> None:
        """Retract `req` no more: a transfer reads its pages until `let_go`."""
        self.retraction.held[req] = None

    def let_go(self, req: Req) -> None:
        """Let `req` be retracted again: its transfer has ended."""
        self.retraction.held.pop(req, None)

    def suspend(self, req: Req) -> bool:
        """Have a running request take no further step until `admit_prefilled`. What is in flight of it is awaited.

        False when that is not possible now: it is in an extend, or its last token is in flight.
        """
        if not req.wants_decode or req not in self.running_batch:
            return False
        self.running_batch.remove(req)
        return True

    def jumped(self, req: Req) -> None:
        """Have the next step of `req` compute the tokens that it jumped over; nothing of it is in flight."""
        assert req not in self._leaving, "with its last token in flight there was no room for a jump"
        if req not in self.running_batch:
            self.running_batch.append(req)

    def remove(self, req: Req) -> None:
        """Forget a request that ended, wherever it is. Its KV is the caller's to release."""
        if req is self.chunked_req:
            self.chunked_req = None
        self.waiting_queue.pop(req, None)
        self._cached.forget(req)
        if req.kv is not None and req in self.running_batch:  # at most `max_running_requests`
            self.running_batch.remove(req)
        self.retraction.remove(req)
