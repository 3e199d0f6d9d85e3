"""The sequences of one HTTP request, from token ids to the client's text and its answer. All dialects use it.

body ──read──▶ Asked ──▶ GenerationGroup ──Dialect──▶ events, or one answer

async with generator.open(prompts) as group:      every sequence is sent to its nodes
    async for generation, text in group.steps():  a sequence with new tokens or its end, and the text that it adds
        ...
                                                  leaving the block ends the sequences that still run, on every node
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from starlette.types import Scope

from router.config import HttpLimits
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.running_req import Aborted, RunningReq
from router.http.responses import StreamForm, json_response, stream_response, while_connected
from router.request.admission import Admission, Admissions
from router.request.output_text import (
    AbortReason,
    FinishReason,
    LengthReason,
    OutputText,
    StopReason,
    stop_conditions,
)
from router.request.prompt import MAX_ANSWER_LOGPROBS, Intake, Prompt
from router.text.served_model import ModelSlot, ServedModel
from router.text.stops import StopConditions
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.protocol.logprobs import TokenLogprobs
from shared.protocol.messages import Stamp
from shared.timeline import ReqStage

ABORTED_STATUS = 499
_RETRY_S = 1.0
"""How often a request that waits for a decode node looks for one."""
_TOKENS_A_TURN = 65_536
"""Prompt tokens that are dispatched in one turn of the event loop: about 2 ms of work (2 cores)."""
_TOKENS_A_SEQUENCE = 4096
"""The cost of dispatching a sequence without its prompt, in tokens."""


class Generation:
    """One sequence: its output so far, and its `finish_reason`, as in the native API, once it has ended."""

    def __init__(
        self, prompt: Prompt, prompt_index: int, choice: int, index: int, output: OutputText
    ) -> None:
        self.prompt = prompt
        self.prompt_index = prompt_index
        self.choice = choice
        self.index = index
        self.output_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.finished_at: float | None = None
        self.queued_at = time.time()
        self._req: RunningReq | None = None
        self.output = output

    @property
    def output_ids(self) -> list[int]:
        """The output tokens so far, at most up to the stop that ended them."""
        return self.output.token_ids

    @property
    def started(self) -> bool:
        """True once the sequence was dispatched."""
        return self._req is not None

    @property
    def req(self) -> RunningReq:
        """The dispatcher's record of the sequence, which must have been dispatched."""
        assert self._req is not None
        return self._req

    def dispatched(self, req: RunningReq) -> None:
        """Note that the sequence was sent, as `req`."""
        self._req = req

    def advance(self) -> str:
        """Take the tokens that have arrived; returns the text that they add. Raises the sequence's RequestError."""
        req = self.req
        token_ids, finish, num_before = req.take(), req.finish, len(self.output_ids)
        if req.error is not None:
            raise self.prompt.in_terms_of_request(req.error)
        added = self.output.add(token_ids, finish)
        if self.prompt.work.params.logprobs is not None:
            self.output_logprobs += req.take_logprobs(num_before, len(self.output_ids))
        if self.output.matched is not None:
            self._finish(StopReason(matched=self.output.matched))
        elif isinstance(finish, Aborted):
            self._finish(AbortReason(message=finish.message, status_code=ABORTED_STATUS))
        elif finish is not None and finish.type == "stop":
            self._finish(StopReason(matched=finish.matched))
        elif finish is not None:
            self._finish(LengthReason(length=len(self.output_ids)))
        return added

    @property
    def num_logprobs(self) -> int:
        """The numbers in `output_logprobs`."""
        wanted = self.prompt.work.params.logprobs
        return 0 if wanted is None else len(self.output_logprobs) * wanted.numbers_per_token

    @cached_property
    def _unpacked_input_logprobs(self) -> list[TokenLogprobs]:
        assert self.req.input_logprobs is not None
        return self.req.input_logprobs.unpack()

    @property
    def input_logprobs(self) -> list[TokenLogprobs]:
        """Logprobs of the prompt tokens after logprob_start_len; empty before the first output token has arrived."""
        return self._unpacked_input_logprobs if self.req.input_logprobs is not None else []

    @property
    def timeline(self) -> list[Stamp]:
        """The stages of the sequence on all nodes, in order of time."""
        stamps = [Stamp("router", ReqStage.QUEUED, self.queued_at), *self.req.stamps]
        if self.finished_at is not None:
            stamps.append(Stamp("router", ReqStage.FINISHED, self.finished_at))
        return sorted(stamps, key=lambda stamp: stamp.time)

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.finished_at = time.time()


class GenerationGroup:
    """All sequences of one request, an asynchronous context."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        admission: Admission,
        patience_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._patience_s = patience_s
        self._admission = admission
        self._ready: dict[Generation, None] = {}
        self._one_ready: asyncio.Future[None] | None = None
        """`steps` waits for it while no sequence is ready."""
        self._tokenizer = tokenizer
        self.prompts = prompts
        self.generations: list[Generation] = []
        """All sequences, once the context is entered."""
        self._unfinished: set[Generation] = set()
        self._num_logprobs = 0
        """Numbers about output tokens so far."""
        self._deadline: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> GenerationGroup:
        """Send every sequence. After a RequestError none of them runs."""
        try:
            options = [prompt.options for prompt in self.prompts]
            for prompt in options:
                if prompt.stop or prompt.stop_regex:
                    self._tokenizer.require_text("a stop string", "stop_token_ids")
            for at, conditions in enumerate(await stop_conditions(options, self._tokenizer.workers)):
                self._add(at, conditions)
            num_tokens = 0
            for generation in self.generations:
                num_tokens += _TOKENS_A_SEQUENCE + len(generation.prompt.work.input_ids)
                if num_tokens > _TOKENS_A_TURN:
                    num_tokens = 0
                    await asyncio.sleep(0)
                await self._start(generation)
        except BaseException:
            self._release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the sequences that still run, since the client has its answer or is gone, or a sequence failed."""
        self._release()

    async def steps(self) -> AsyncIterator[tuple[Generation, str]]:
        """Each sequence that has new tokens or has ended, with the text that it adds. Raises RequestError."""
        self._unfinished = set(self.generations)
        self._fail_overdue()
        while self._unfinished:
            while not self._ready:
                self._one_ready = asyncio.get_running_loop().create_future()
                await self._one_ready
            ready, self._ready = self._ready, {}
            for generation in ready:
                if generation not in self._unfinished:
                    continue
                text = self._advance(generation)
                if generation.finish_reason is not None:
                    self._unfinished.remove(generation)
                yield generation, text

    async def finished(self) -> list[Generation]:
        """Wait until all sequences have finished, and return them. Raises RequestError."""
        async for _ in self.steps():
            pass
        return self.generations

    def _add(self, prompt_index: int, conditions: StopConditions | None) -> None:
        prompt = self.prompts[prompt_index]
        for choice in range(prompt.options.n):
            output = OutputText(self._tokenizer, prompt, conditions)
            index = len(self.generations)
            self.generations.append(Generation(prompt, prompt_index, choice, index, output))

    async def _start(self, generation: Generation) -> None:
        """Send a sequence as soon as there is a decode node."""
        prompt = generation.prompt
        work, wake = prompt.work_of(generation.choice), partial(self._wake, generation)
        began = time.monotonic()
        give_up_at = began + self._patience_s
        while True:
            abort_message = self._admission.abort_message(prompt.rid)
            try:
                if abort_message is not None:
                    req = self._dispatcher.abort_unsent(work, wake, abort_message)
                else:
                    waited_s = time.monotonic() - began
                    req = self._dispatcher.start(
                        work,
                        wake,
                        split=prompt.split,
                        in_time=self._admission.is_queued and generation is self.generations[0],
                        rid=prompt.rid,
                        waited_s=waited_s,
                    )
                break
            except RequestError as e:
                if e.code != "no_node" or time.monotonic() >= give_up_at:
                    raise self._named(e, generation) from e
            await asyncio.sleep(min(_RETRY_S, max(0.0, give_up_at - time.monotonic())))
        generation.dispatched(req)
        self._admission.sent(prompt.rid, req)

    def _wake(self, generation: Generation) -> None:
        self._ready[generation] = None
        if self._one_ready is not None and not self._one_ready.done():
            self._one_ready.set_result(None)

    def _fail_overdue(self) -> None:
        """Fail the sequences whose deadline has passed, and set the timer to the next deadline.

        One timer serves all sequences, and the arrival of a token does not change it.
        """
        self._deadline = None
        running = [generation.req for generation in self._unfinished if not generation.req.ended]
        for req in running:
            if self._dispatcher.seconds_left(req) <= 0:
                self._dispatcher.expire(req)
        left = [self._dispatcher.seconds_left(req) for req in running if not req.ended]
        if left:
            self._deadline = asyncio.get_running_loop().call_later(min(left), self._fail_overdue)

    def _advance(self, generation: Generation) -> str:
        num_before = len(generation.output_logprobs)
        try:
            text = generation.advance()
        except RequestError as e:
            raise self._named(e, generation) from e
        wanted = generation.prompt.work.params.logprobs
        if wanted is not None:
            self._num_logprobs += (len(generation.output_logprobs) - num_before) * wanted.numbers_per_token
            if self._num_logprobs > MAX_ANSWER_LOGPROBS:
                raise RequestError(f"the logprobs of the output have more than {MAX_ANSWER_LOGPROBS} numbers")
        if generation.finish_reason is not None:
            self._dispatcher.stop(generation.req, len(generation.output_ids))
        return text

    def _named(self, error: RequestError, generation: Generation) -> RequestError:
        """The error with the prompt's index in a batch. If the prompt is too long, `param` is the prompt's field."""
        too_long = error.code == "context_length_exceeded"
        return RequestError(
            error.message if len(self.prompts) == 1 else f"prompt {generation.prompt_index}: {error.message}",
            status=error.status,
            param=generation.prompt.asked_in if too_long else error.param,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )

    def _release(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for generation in self.generations:
            if generation.started:
                self._dispatcher.release(generation.req)
        self._admission.release_rids()


class Generator:
    """Opens groups and aborts requests. While there is no decode node, a request waits for one for `patience_s`."""

    def __init__(self, dispatcher: Dispatcher, admissions: Admissions, *, patience_s: float = 0.0) -> None:
        self._dispatcher = dispatcher
        self._admissions = admissions
        self._patience_s = patience_s

    def open(self, prompts: Sequence[Prompt], tokenizer: Tokenizer, admission: Admission) -> GenerationGroup:
        """The sequences of `prompts`, an asynchronous context.

        `admission` holds their places in the queue until they are sent, and their rids until the context is left.
        Those beside the queue do not wait for a node.
        """
        prompts = [prompt.in_cache_of(admission.cache_owner) for prompt in prompts]
        patience_s = self._patience_s if admission.is_queued else 0.0
        return GenerationGroup(prompts, tokenizer, self._dispatcher, admission, patience_s)

    @contextlib.asynccontextmanager
    async def probe(self, prompt: Prompt, tokenizer: Tokenizer) -> AsyncIterator[GenerationGroup]:
        """The sequence of a prompt beside the queue, an asynchronous context."""
        with self._admissions.beside_the_queue() as admission:
            admission.take([prompt.rid], [1], whole=None, shared=False)
            async with self.open([prompt], tokenizer, admission) as group:
                yield group

    def abort(self, rid: str | None, message: str) -> int:
        """End the requests with `rid`, or all; returns how many sequences ran or waited."""
        num_aborted = 0
        for admission in self._admissions.find(rid):
            num_unsent, running = admission.abort(rid, message)
            for req in running:
                self._dispatcher.abort(req, message)
            num_aborted += num_unsent + len(running)
        return num_aborted


# ------------------------------------------------------------------------------------- the answer of a route
@dataclass(frozen=True, kw_only=True)
class Asked:
    """A checked body: what is to be completed, and whether the answer is a stream of events."""

    prompts: Sequence[Prompt]
    streams: bool


class Dialect(Protocol):
    """The words of one route, for the answer to one request."""

    @property
    def form(self) -> StreamForm:
        """Of a stream."""
        ...

    def events(self, group: GenerationGroup) -> AsyncGenerator[object, None]:
        """The events of a stream. The group is entered here."""
        ...

    async def answer(self, group: GenerationGroup) -> object:
        """The answer to a request for no stream. The group is entered here."""
        ...


A = TypeVar("A", bound=Asked)
_GROUP = "generation_group"


@dataclass(frozen=True)
class Desk:
    """What the routes that generate have in common."""

    generator: Generator
    slot: ModelSlot
    limits: HttpLimits

    async def respond(
        self,
        request: Request,
        admission: Admission,
        read: Callable[[Intake], Coroutine[Any, Any, A]],
        dialect: Callable[[A, ServedModel], Dialect],
    ) -> Response:
        """Read a body, generate, and answer in a dialect. Raises RequestError."""
        model = self.slot.get()
        intake = Intake(model, self.limits, request.headers, admission)
        asked = await while_connected(request.receive, read(intake))
        group = self.generator.open(asked.prompts, model.tokenizer, admission)
        setattr(request.state, _GROUP, group)
        words = dialect(asked, model)
        if asked.streams:
            return await stream_response(request, words.events(group), words.form)
        return json_response(await while_connected(request.receive, words.answer(group)))


def group_of(scope: Scope) -> GenerationGroup | None:
    """The sequences of a request that has been answered, if it is one that has any."""
    group: GenerationGroup | None = scope["state"].get(_GROUP)
    return group
