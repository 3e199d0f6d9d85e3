"""The decode node's loop.

Life of a request here:

    grammar_queue      until its grammar is compiled, if it has one
    prealloc_queue     until pages and a slot are reserved for it
    transfer_queue     until its KV and its first token have come from the prefill node
    running_batch      one token each step (after a jump, all that it jumped over), until it ends
    waiting_queue      a short prompt that is prefilled here
    retraction         after it made room for others, until its KV is copied back or prefilled again
    moves              while another decode node takes its KV: beside running_batch, at the end instead of it
    trial              if it is to run alone, until no other request is here; then it enters a queue as any

A request that moves here from another decode node goes through the same queues, and is refused where it would have to
wait for pages. Its first message repeats the tokens that the other node has told the router since the dispatch.

Three kinds of work meet in one Batcher: transferred requests enter `running_batch` directly, local prompts go
through `waiting_queue` and `chunked_req` first, and retracted requests come back by either way.
"""

from __future__ import annotations

from functools import partial

from decode_node.moves import Moves
from decode_node.prealloc_queue import PreallocQueue
from decode_node.trial import HANDED_BACK, Trial
from shared.engine.loop_parts import NodeParts, new_grammar_queue, new_launcher
from shared.engine.req_table import ReqTable
from shared.engine.router_desk import RouterDesk
from shared.engine.vitals import QueuedTokens
from shared.errors import RequestError, TransferError
from shared.kvtransfer.lending import Lending
from shared.kvtransfer.queues import evict_corrupt, take_over
from shared.kvtransfer.states import Received, ReceiveFailed, SendEnded
from shared.protocol.messages import (
    Cancel,
    Decode,
    Lend,
    Load,
    Move,
    Moved,
    NodeRef,
    NotCached,
    ReqKey,
    TokenEntry,
)
from shared.protocol.transfer_messages import Ready
from shared.scheduling.batcher import Batcher
from shared.scheduling.commit import Outcome
from shared.scheduling.plan import Plan
from shared.scheduling.req import Req
from shared.timeline import ReqStage


class DecodeScheduler:
    """Decides for every request, page and row of a decode node. Runs on one thread."""

    def __init__(self, parts: NodeParts) -> None:
        engine, transfer, options = parts.engine, parts.transfer, parts.config.schedule
        receiver, sender, peering = transfer.receiver, transfer.sender, transfer.peering
        router_port, vitals = parts.router_port, parts.vitals
        self._ledger = engine.ledger
        self._receiver = receiver
        self._sender = sender
        self._peering = peering
        self._router_port = router_port
        self._vitals = vitals
        self._launcher = new_launcher(engine, options)
        self.grammar_queue = new_grammar_queue(parts)
        self.batcher = Batcher(engine.ledger, options)
        self.prealloc_queue = PreallocQueue(
            engine.ledger, receiver, options, self.batcher.in_order, engine.clock
        )
        self.transfer_queue: dict[ReqKey, Req] = {}
        """SGLang's DecodeTransferQueue. The receiver owns the pages of its requests until their transfers end."""
        self.moves = Moves(engine.ledger, sender, peering, self.batcher, router_port)
        self.lending = Lending(engine.ledger, sender, peering, engine.clock)
        self.queued_tokens = QueuedTokens(engine.ledger)
        queues = (self.grammar_queue, self.prealloc_queue, self.batcher, self.queued_tokens)
        self.reqs = ReqTable(engine.ledger, router_port, queues, self._cancel_transfer)
        self._clock = engine.clock
        self._trial: Trial | None = None
        """The latest one."""
        self._desk = RouterDesk(parts, self.reqs, self.grammar_queue, self.batcher)

    def step(self) -> bool:
        """Take one turn. False when it has nothing left to do."""
        self._hear()
        plan = self._plan()
        outcome = self._launcher.turn(plan)
        self._account(plan, outcome)
        self._speak(outcome)
        return outcome.worked or self.lending.offers_more

    # ------------------------------------------------------------------------------------------- hear
    def _hear(self) -> None:
        for heard in self._desk.hear():
            match heard.message:
                case Decode():
                    self._start(heard.message)
                case Lend():
                    self.lending.start(heard.message)
                case Move(key):
                    self.moves.start(heard.message, self.reqs.get(key))
                case Cancel(key):
                    self.moves.cancel(key, "cancelled by the router")
        self._receiver.tick()
        self._sender.tick()
        self._hear_transfers()
        self.lending.advance(beside_handoffs=len(self.moves) > 0)
        if self._trial is not None:
            self._trial.advance()

    def _hear_transfers(self) -> None:
        for event in self._receiver.poll():
            match event:
                case Received():
                    self._received(event)
                case ReceiveFailed():
                    self._receive_failed(event)
        for sent in self._sender.poll():
            if isinstance(sent, SendEnded):
                self._vitals.count_transfer(sent.nbytes, sent.seconds, ok=sent.ok)
            if self.lending.hear(sent):
                continue
            match sent:
                case Ready():
                    self.moves.ready(sent)
                case SendEnded():
                    self._move_ended(sent)

    def _start(self, message: Decode) -> None:
        if self._trial is not None and self._trial.excludes_others:
            self._router_port.hand_back(message.key, HANDED_BACK)
            return
        req = self._desk.accept(message)
        if req is None:
            return
        limit = message.local_prefill_limit
        if limit is not None:
            num_cached = (
                self._ledger.peek_prefix(req.matchable_ids, req.extra_key).num_pages * self._ledger.page_size
            )
            if len(req.ids) - num_cached > limit:
                self._router_port.say(NotCached(req.key))
                return
        self.reqs.add(req)
        enqueue = partial(self._enqueue, req, message.prefill, message.moving)
        if req.params.grammar is not None:
            enqueue = partial(self.grammar_queue.add, req, enqueue)
        if message.alone_tokens:
            self._trial = Trial(
                req,
                message.alone_tokens,
                enqueue,
                reqs=self.reqs,
                router_port=self._router_port,
                clock=self._clock,
            )
        else:
            enqueue()

    def _enqueue(self, req: Req, source: NodeRef | None, moving: bool) -> None:
        if source is None:
            self.queued_tokens.add(req)
            self.batcher.add(req)
            return
        self.batcher.arrived(req)
        if moving:
            self.prealloc_queue.add_moving(req, source)
        else:
            self.prealloc_queue.add(req, source)

    def _received(self, received: Received) -> None:
        req = self.transfer_queue.pop(received.key)
        self._vitals.count_transfer(received.nbytes, received.seconds)
        self.batcher.retraction.costs.transfer.observe(received.nbytes, received.seconds)
        if req.finish is not None:  # cancelled after its last page had come
            self.reqs.release(req)
            return
        try:
            take_over(req, received, self._ledger)
        except TransferError as error:
            self.reqs.fail(req, RequestError(str(error), status=500), blames=received.sender)
            return
        req.timeline.move_to(ReqStage.DECODING)
        self.batcher.admit_prefilled(req)
        handoff = received.handoff
        report = req.report()  # the stamps so far; the finish brings the others
        logprobs = handoff.logprobs, handoff.input_logprobs
        at = len(req.work.output_ids)
        self._router_port.say_tokens(TokenEntry(req.key, at, handoff.token_ids, None, report, *logprobs))

    def _receive_failed(self, failed: ReceiveFailed) -> None:
        req = self.transfer_queue.pop(failed.key)
        # A sending node that gives a request up before its handoff tells the router itself.
        if failed.handed_off or not failed.by_peer:
            reason = f"KV transfer to this node failed: {failed.reason}"
            error = RequestError(reason, status=500 if failed.corrupt else 503)
            self.reqs.fail(req, error, blames=failed.sender)
        self.reqs.end(req.key, failed.reason)

    def _move_ended(self, ended: SendEnded) -> None:
        req = self.moves.ended(ended)
        if req.finish is not None:  # it ended while its pages were read
            self.reqs.release(req)
        elif ended.ok:
            self._router_port.say(Moved(req.key))
            req.evict_first = True
            self.reqs.end(req.key, "moved to another node")
        elif ended.corrupt:
            reason = "the pages of this request left this node corrupt"
            self.reqs.fail(req, RequestError(reason, status=500))
        if ended.corrupt:
            evict_corrupt(req, ended, self._ledger)

    def _cancel_transfer(self, key: ReqKey, reason: str) -> bool:
        """End the transfer of a request; False when none is under way. The event that ends it follows."""
        if key not in self.transfer_queue:
            return self.moves.cancel_of(key, reason)
        self._receiver.cancel(key, reason)
        return True

    # ------------------------------------------------------------------------------------------- plan
    def _plan(self) -> Plan:
        self._reserve()
        with self._launcher.planning():
            return self.batcher.plan(self.prealloc_queue.first)

    def _reserve(self) -> None:
        blocked = self.batcher.first_blocked()
        batcher = self.batcher
        reservations = self.prealloc_queue.reserve(
            lambda req: batcher.is_open_to(req, blocked), lambda req: batcher.is_open_to_move(req, blocked)
        )
        for req in reservations.reserved:
            self.transfer_queue[req.key] = req
        for req in reservations.refused:
            self.reqs.fail(req, RequestError("this node has no room for a request that moves", status=503))

    # ---------------------------------------------------------------------------------------- account
    def _account(self, plan: Plan, outcome: Outcome) -> None:
        self.batcher.observe(outcome)
        self.queued_tokens.computed(outcome.computed)
        for req in outcome.computed:
            assert req.kv is not None
            if req not in self.moves:
                self._ledger.release_superseded(req.kv)  # no transfer of this node reads those pages
        for req in outcome.sampled:
            finished = req.finish is not None
            prefilled = req.timeline.stage is ReqStage.PREFILLING
            if prefilled:
                req.timeline.move_to(ReqStage.DECODING)
                self._count_prompt(req)
            elif finished and req.timeline.left_prefilling:
                self._count_prompt(req)  # its first token was its last
            if req.num_jumped and not finished and not self.moves.is_stopped(req):
                self.batcher.jumped(req)
            self._desk.say_tokens(req, req.newest_ids, with_report=finished or prefilled)
        for req in outcome.finished:
            if not req.output_len:  # max_new_tokens 0: nothing was to be sampled
                self._count_prompt(req)
                self._desk.say_tokens(req, ())
            self.reqs.end(req.key, "finished")
        self._vitals.count_generated(len(outcome.sampled), sum(req.num_jumped for req in outcome.sampled))
        self._desk.fail(plan, outcome)
        for key in plan.given_up:
            self.moves.cancel_of(key, "its pages are needed for other requests")
        self._router_port.want_moved(plan.move_wanted)

    def _count_prompt(self, req: Req) -> None:
        """Count a prompt that was prefilled here, once: a prefill after a retraction is not counted again."""
        if not req.num_retractions:
            self._vitals.count_prompt(req.num_input_ids, req.cached_tokens)

    # ------------------------------------------------------------------------------------------ speak
    def _speak(self, outcome: Outcome) -> None:
        targets = self._sender.unreachable | self._peering.unreachable
        load = Load(
            num_running=len(self.batcher.running_batch),
            num_transferring=len(self.transfer_queue) + len(self.moves),
            num_bootstrapping=len(self.prealloc_queue),
            num_queued_tokens=self.queued_tokens.total,
            reserve_wait_s=self.prealloc_queue.longest_wait_s,
            links=self._receiver.link_reports + self._sender.link_reports,
            unreachable={name: why for name, why in targets.items() if not self.lending.is_borrower(name)}
            | self._receiver.unreachable,  # a node that cannot borrow may still hand off to this one
        )
        self._desk.speak(outcome, load, has_loans=len(self.lending) > 0)
        self.moves.advance()  # all tokens have been told

    def close(self, reason: str) -> None:
        """Fail every request, end every transfer and wait for what is in flight: then every page is home."""
        self._desk.close(reason)
        self._receiver.close()
        self._sender.close()
        self._hear_transfers()
        self._launcher.close()
