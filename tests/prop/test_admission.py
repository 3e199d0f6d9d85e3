"""Every place in the queue is given back, and every name, whatever becomes of who held it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.dispatch.node import Loss
from router.dispatch.running_req import RunningReq
from router.request.admission import Admission, Admissions
from router.request.generation import GenerationGroup, Generator
from router.request.prompt import AnswerOptions, Prompt
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.protocol.messages import Failed, Finish, Role, TokenEntry, Work
from shared.protocol.sampling_params import SamplingParams
from tests.unit.router.dispatched import SeenFleet
from tests.unit.router.fake_node import byte_level_tokenizer

MAX_QUEUED = 6
LONG = 40_000
"""Not two of these are dispatched in one turn."""
TOO_LONG = 100_000
WHICH = st.integers(0, 3)
TOKENIZER = Tokenizer(byte_level_tokenizer())

EVENTS = (
    *["first token"] * 4,
    *["late token", "last token", "no token at all"],
    *["failed", "not cached", "abort", "expire", "stop", "prefill node lost", "decode node lost"],
)


@dataclass(eq=False)
class Client:
    """One request, from its places to its end. `entering` is there once it is being dispatched."""

    admission: Admission
    name: str
    num_sequences: int
    called_off: bool = False
    group: GenerationGroup | None = None
    entering: asyncio.Task[GenerationGroup] | None = None

    @property
    def reqs(self) -> list[RunningReq]:
        started = [g.req for g in self.group.generations if g.started] if self.group is not None else []
        return [req for req in started if not req.ended]

    @property
    def num_prompts(self) -> int:
        return self.num_sequences if self.num_sequences % 2 == 0 else 1

    @property
    def rids(self) -> list[str]:
        return [f"{self.name}_{at}" for at in range(self.num_prompts)]

    @property
    def failed(self) -> bool:
        """Refused while it was dispatched; its handler has not ended yet."""
        return self.entering is not None and self.entering.done() and self.entering.exception() is not None

    @property
    def num_started(self) -> int:
        return sum(g.started for g in self.group.generations) if self.group is not None else 0

    @property
    def num_waiting(self) -> int:
        """Those not dispatched yet, unless they never will be, and those that were and have no token."""
        num_held = self.num_sequences - self.num_started
        return num_held + sum(req.first_token_at is None for req in self.reqs)


class AdmissionMachine(RuleBasedStateMachine):
    """Clients come, are dispatched in turns of the event loop, hear from nodes, and go at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.fleet = SeenFleet(2)
        self.dispatcher = self.fleet.dispatcher
        self.num_rejected = 0
        self.admissions = Admissions(self.dispatcher.queue, MAX_QUEUED, self.on_rejected)
        self.generator = Generator(self.dispatcher, self.admissions)
        self.clients: list[Client] = []
        self.names = itertools.count()

    def on_rejected(self) -> None:
        self.num_rejected += 1

    @property
    def tokenizing(self) -> list[Client]:
        return [client for client in self.clients if client.entering is None]

    @property
    def reqs(self) -> list[RunningReq]:
        return [req for client in self.clients for req in client.reqs]

    @property
    def num_waiting(self) -> int:
        return sum(client.num_waiting for client in self.clients)

    @rule(num_sequences=st.integers(1, MAX_QUEUED + 1), tokenizes=st.booleans())
    def arrive(self, num_sequences: int, tokenizes: bool) -> None:
        waiting, rejected = self.num_waiting, self.num_rejected
        if waiting + num_sequences <= MAX_QUEUED:
            client = Client(self.admissions.admit(), f"job{next(self.names)}", num_sequences)
            n = num_sequences // client.num_prompts
            client.admission.take(client.rids, [n] * client.num_prompts, whole=client.name, shared=False)
            self.clients.append(client)
            assert self.num_rejected == rejected
            if not tokenizes:
                self.dispatch(client, "short")
            return
        with pytest.raises(RequestError) as caught, self.admissions.admit() as admission:
            admission.take(["refused"], [num_sequences], whole=None, shared=False)
        assert self.num_waiting == waiting
        if num_sequences > MAX_QUEUED and waiting < MAX_QUEUED:
            assert (caught.value.status, self.num_rejected) == (400, rejected)
        else:
            assert (caught.value.status, self.num_rejected) == (429, rejected + 1)
            assert 1 <= (caught.value.retry_after_s or 0) <= 60

    @rule(which=WHICH, prompts=st.sampled_from(["short", "long", "long", "one too long"]))
    def tokenized(self, which: int, prompts: str) -> None:
        for client in self.tokenizing[which : which + 1]:
            self.dispatch(client, prompts)

    @rule()
    def turn(self) -> None:
        """Of the event loop: long prompts need several to be dispatched."""
        self.loop.run_until_complete(asyncio.sleep(0))
        for client in self.clients[:]:
            if client.entering is not None and client.entering.done() and client.entering.exception():
                self.go(client)

    @rule(which=WHICH, what=st.sampled_from(EVENTS))
    def something_happens(self, which: int, what: str) -> None:
        for req in self.reqs[which : which + 1]:
            if not req.nodes:
                continue
            node = req.nodes[which % len(req.nodes)]
            match what:
                case "first token":
                    self.tokens(req, TokenEntry(req.key, 0, (7,)))
                case "late token":
                    self.tokens(req, TokenEntry(req.key, 1, (7,)))
                case "last token":
                    self.tokens(req, TokenEntry(req.key, 0, (7,), Finish("length")))
                case "no token at all":
                    self.tokens(req, TokenEntry(req.key, 0, (), Finish("length")))
                case "failed":
                    self.dispatcher.on_failed(node, Failed(req.key, 500, "broken"))
                    self.fleet.wait(which)
                case "not cached" if req.first_token_at is None:
                    self.dispatcher.on_not_cached(node, req.key)
                case "abort":
                    self.dispatcher.abort(req, "called off")
                case "expire":
                    self.dispatcher.expire(req)
                case "stop":
                    self.dispatcher.stop(req, 1)
                case "prefill node lost" | "decode node lost":
                    role = Role.PREFILL if what.startswith("prefill") else Role.DECODE
                    self.dispatcher.on_node_lost(self.fleet.live(role)[0], "it died", Loss.CRASHED)
                    self.fleet.wait(which)

    @rule(which=WHICH)
    def client_goes(self, which: int) -> None:
        for client in self.clients[which : which + 1]:
            self.go(client)

    def tokens(self, req: RunningReq, entry: TokenEntry) -> None:
        """From both nodes, and twice: the router takes each position once."""
        for node in (*req.nodes, *req.nodes[:1]):
            self.dispatcher.on_tokens(node, (entry,))

    def dispatch(self, client: Client, prompts: str) -> None:
        """As one prompt or as several; that one is too long is found out after those before it were sent."""
        n = client.num_sequences // client.num_prompts
        length = LONG if prompts == "long" else 3
        lengths = [length] * client.num_prompts
        if prompts == "one too long":
            lengths[-1] = TOO_LONG
        params, options = SamplingParams(max_new_tokens=4), AnswerOptions(n=n)
        client.group = self.generator.open(
            [
                Prompt(rid=rid, work=Work((1,) * length, params), options=options, split=True)
                for rid, length in zip(client.rids, lengths, strict=True)
            ],
            TOKENIZER,
            client.admission,
        )
        client.entering = self.loop.create_task(client.group.__aenter__())
        self.turn()

    def go(self, client: Client) -> None:
        """As a handler ends: its group is left, or is cancelled while it is entered; then its places."""
        self.clients.remove(client)
        if client.entering is not None and client.group is not None:
            client.entering.cancel()
            (entered,) = self.loop.run_until_complete(asyncio.gather(client.entering, return_exceptions=True))
            if entered is client.group:
                self.loop.run_until_complete(client.group.__aexit__(None, None, None))
            else:
                assert isinstance(entered, RequestError | asyncio.CancelledError), entered
        client.admission.__exit__(None, None, None)

    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        """By the batch's name, wherever it is on its way: what is running ends, and nothing more is sent."""
        for client in self.clients[which : which + 1]:
            if client.entering is not None and client.entering.done():
                expected = len(client.reqs)
            else:
                num_unsent = 0 if client.called_off else client.num_sequences - client.num_started
                expected = num_unsent + len(client.reqs)
            assert self.generator.abort(client.name, "called off") == expected
            client.called_off = True
            assert not client.reqs

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.admissions.num_queued == self.num_waiting <= MAX_QUEUED
        assert len(self.admissions.holders) == sum(
            1 + client.num_prompts for client in self.clients if not client.failed
        )
        assert not any(client.reqs for client in self.clients if client.called_off), "sent after its abort"

    def teardown(self) -> None:
        for client in self.clients[:]:
            self.go(client)
        self.loop.close()
        assert self.admissions.num_queued == self.dispatcher.num_running == len(self.admissions.holders) == 0
        with self.admissions.admit() as admission:
            admission.take(["all"], [MAX_QUEUED], whole=None, shared=False)
            with pytest.raises(RequestError):
                self.admissions.admit()


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=100, stateful_step_count=40)
