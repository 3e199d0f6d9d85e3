"""Schedulers of both roles in one thread, over the fake network and a virtual clock, with a scripted router."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from router.dispatch.node import PrefixIndex
from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions, TransferOptions
from shared.engine.build import Engine
from shared.engine.loop_parts import NodeParts
from shared.engine.vitals import Vitals
from shared.kvcache.audit import audit, audit_idle
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.receiver import KVReceiver
from shared.kvtransfer.sender import KVSender
from shared.kvtransfer.sides import TransferSides
from shared.kvtransfer.transports.choice import Transports
from shared.protocol.logprobs import TokenLogprobs
from shared.protocol.messages import (
    PROTOCOL_VERSION,
    Answered,
    CacheEvents,
    CacheResync,
    Cancel,
    Decode,
    Failed,
    Finish,
    Lend,
    Load,
    Move,
    Moved,
    MoveWanted,
    NodeHello,
    NodeRef,
    NotCached,
    Ping,
    Pong,
    Prefill,
    ReqKey,
    ReqReport,
    Role,
    RunsAlone,
    Source,
    TokenEntry,
    Tokens,
    Work,
)
from shared.protocol.router_port import RouterPort
from shared.protocol.sampling_params import SamplingParams
from tests.fake_link import fake_transports
from tests.fake_network import FakeNetwork, Faults

ROUTER = "router"
MakeEngine = Callable[[NodeConfig], Engine]
MakeTransports = Callable[[FakeNetwork, str, TransferOptions], Transports]


def small_config(
    *,
    tokens: int = 640,
    page_size: int = 4,
    host_tokens: int = 0,
    keeps_prefixes: bool = True,
    chunk: int = 16,
    slots: int = 8,
    headroom: int = 4,
    overlap: bool = True,
    context_length: int = 400,
    **schedule: object,
) -> NodeConfig:
    """Of a node with a small pool. `schedule` are further ScheduleOptions."""
    return NodeConfig(
        cache=CacheOptions(
            page_size=page_size,
            max_total_tokens=tokens,
            host_kv_tokens=host_tokens,
            disable_radix_cache=not keeps_prefixes,
        ),
        schedule=ScheduleOptions(
            chunked_prefill_size=chunk,
            max_running_requests=slots,
            num_reserved_decode_tokens=headroom,
            disable_overlap_schedule=not overlap,
            debug_checks=True,
            **schedule,  # type: ignore[arg-type]
        ),
        model=ModelOptions(context_length=context_length),
    )


def sender_of(name: str) -> str:
    """The party by which a decode node sends: the fake network has one connection between two parties."""
    return f"{name}.sender"


def receiver_of(name: str) -> str:
    """The party by which a prefill node receives what others lend."""
    return f"{name}.receiver"


def ref(name: str) -> NodeRef:
    """The NodeRef of a node of the cluster. Its name is also its incarnation."""
    return NodeRef(name, name, "tcp://nowhere:0")


@dataclass
class Answer:
    """What the router has received for one request."""

    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    failures: list[Failed] = field(default_factory=list)
    reports: list[ReqReport] = field(default_factory=list)
    ahead: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By output position."""
    input_logprobs: list[TokenLogprobs] | None = None
    positions: list[int] = field(default_factory=list)
    """The output position of every token that was received, repeated ones included."""
    logprob_positions: list[int] = field(default_factory=list)
    """The positions of all logprobs that were received. -1 stands for the logprobs of the prompt."""

    @property
    def ended(self) -> bool:
        return self.finish is not None or bool(self.failures)


@dataclass
class AnsweredMove:
    """What the router has heard of one move. Its request is known by the key under which it was submitted."""

    key: ReqKey
    """Of the attempt that the source runs."""
    to_key: ReqKey
    source: str
    target: str
    arrived: bool = False
    """The target has sent tokens: its attempt is the current one."""
    repeated: range = range(0)
    """The output positions of the target's first message, which the source has told before."""
    left: bool = False
    """The source has said that the request has left it."""
    failures: list[Failed] = field(default_factory=list)


class ScriptedRouter:
    """Sends dispatches, puts tokens in order, and cancels a request on its other node when it ends.

    All attempts at one sequence have one Answer.
    """

    def __init__(self, network: FakeNetwork) -> None:
        self.outbox = network.join(ROUTER, self._on_message)
        self.answers: dict[ReqKey, Answer] = {}
        self.loads: dict[str, Load] = {}
        self.prefixes: defaultdict[str, PrefixIndex] = defaultdict(PrefixIndex)
        self.not_cached: list[ReqKey] = []
        self._holders: dict[ReqKey, set[str]] = {}
        self._works: dict[ReqKey, Work] = {}
        self.moves: dict[ReqKey, AnsweredMove] = {}
        """By the key of the move."""
        self.wanted_moved: list[ReqKey] = []
        self.answered: dict[int, bool] = {}
        """Of calls such as Flush, by their ids."""
        self.alone: list[ReqKey] = []
        """Requests of which a node has said that it holds no other."""

    def submit(
        self,
        rid: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        prefill: str | None,
        decode: str | None,
        *,
        output_ids: Sequence[int] = (),
        attempt: int = 0,
        local_prefill_limit: int | None = None,
        priority: int = 0,
        routing_key: str = "",
        alone_tokens: int = 0,
        lender: str | None = None,
        num_lent_pages: int = 1 << 20,
        extra_key: str = "",
        evicts_first: str | None = None,
    ) -> ReqKey:
        """Send a request to its nodes; the party `lender` is to lend what it has cached to the prefill node."""
        key = ReqKey(ROUTER, rid, attempt)
        self.answers[key] = Answer(token_ids=list(output_ids))
        self._holders[key] = {name for name in (prefill, decode) if name}
        work = Work(
            tuple(input_ids),
            params,
            tuple(output_ids),
            extra_key=extra_key,
            priority=priority,
            routing_key=routing_key,
        )
        self._works[key] = work
        if decode:
            origin = ref(prefill) if prefill else None
            message = Decode(
                key,
                work,
                origin,
                local_prefill_limit,
                alone_tokens=alone_tokens,
                evict_first=evicts_first == decode,
            )
            self.outbox.send(decode, message)
        if prefill:
            target = ref(decode) if decode else None
            source = None
            if lender:
                self.outbox.send(lender.partition(".")[0], Lend(key, ref(receiver_of(prefill)), work))
                source = Source(ref(lender), num_lent_pages)
            self.outbox.send(prefill, Prefill(key, work, target, source, evicts_first == prefill))
        return key

    def cancel(self, key: ReqKey) -> None:
        for holder in sorted(self._holders[key]):
            self.outbox.send(holder, Cancel(key))

    def move(self, key: ReqKey, source: str, target: str) -> AnsweredMove:
        """Move the attempt `key`, which runs on `source`, with the tokens that have come so far."""
        answer = self.answers[key]
        attempt = 1 + max(other.attempt for other in self.answers if other.rid == key.rid)
        to_key = ReqKey(ROUTER, key.rid, attempt)
        work = msgspec.structs.replace(self._works[key], output_ids=tuple(answer.token_ids))
        self.answers[to_key], self._works[to_key] = answer, work
        self._holders[to_key] = {target}
        move = self.moves[to_key] = AnsweredMove(key, to_key, source, target)
        self.outbox.send(target, Decode(to_key, work, ref(sender_of(source)), moving=True))
        self.outbox.send(source, Move(key, to_key, ref(target)))
        return move

    def give_up(self, key: ReqKey, reason: str) -> None:
        """End every attempt at a sequence, on whichever nodes they are."""
        answer = self.answers[key]
        if not answer.ended:
            answer.failures.append(Failed(key, 499, reason))
        for other in [other for other in self.answers if self.answers[other] is answer]:
            for holder in self._holders[other]:
                self.outbox.send(holder, Cancel(other))

    def _on_move_failed(self, move: AnsweredMove, failed: Failed) -> None:
        move.failures.append(failed)
        if move.arrived or move.left:  # the source has it no more
            self.answers[move.key].failures.append(failed)
        self.outbox.send(move.source, Cancel(move.to_key))
        self.outbox.send(move.target, Cancel(move.to_key))

    def _on_arrived(self, entry: TokenEntry) -> None:
        move = self.moves.get(entry.key)
        if move is not None and not move.arrived:
            assert not move.failures, "tokens came from a move that had failed"
            move.arrived = True
            move.repeated = range(entry.position, entry.position + len(entry.token_ids))
            self.outbox.send(move.source, Cancel(move.key))

    def _on_message(self, node: str, message: object) -> None:
        match message:
            case Tokens(entries):
                for entry in entries:
                    answer = self.answers[entry.key]
                    if answer.ended:
                        continue
                    self._on_arrived(entry)
                    for i, token in enumerate(entry.token_ids):
                        answer.positions.append(entry.position + i)
                        self._add_token(answer, entry.position + i, token)
                    self._add_logprobs(answer, entry)
                    if entry.report is not None:
                        answer.reports.append(entry.report)
                    if entry.finish is not None:
                        assert not answer.ahead, "the finish came with a gap open"
                        answer.finish = entry.finish
                        for other in self._holders[entry.key] - {node}:
                            self.outbox.send(other, Cancel(entry.key))
                        for move in self.moves.values():
                            if entry.key == move.key and not move.arrived:
                                self.outbox.send(move.target, Cancel(move.to_key))
            case Answered(call_id, ok):
                self.answered[call_id] = ok
            case RunsAlone(key):
                self.alone.append(key)
            case MoveWanted(keys):
                self.wanted_moved += keys
            case Moved(key):
                move = next(move for move in self.moves.values() if move.key == key and not move.failures)
                move.left = True
            case Failed(key) if key in self.moves and not self.moves[key].failures:
                self._on_move_failed(self.moves[key], message)
            case Failed(key) if key in self.moves:
                pass  # both nodes may tell
            case Failed(key):
                if not self.answers[key].ended:
                    self.answers[key].failures.append(message)
                    for other in self._holders[key] - {node}:
                        self.outbox.send(other, Cancel(key))
            case CacheEvents():
                if not self.prefixes[node].apply(message):
                    self.outbox.send(node, CacheResync())
            case NotCached(key):
                del self.answers[key]
                self.not_cached.append(key)
            case Pong():
                self.loads[node] = message.load
                if not self.prefixes[node].compare(message.cache_seq):
                    self.outbox.send(node, CacheResync())

    def _add_logprobs(self, answer: Answer, entry: TokenEntry) -> None:
        """Store logprobs by position. Both nodes send those of position 0, and they must be equal."""
        for position, known in enumerate(entry.logprobs.unpack() if entry.logprobs else (), entry.position):
            assert answer.logprobs.setdefault(position, known) == known, "repeated logprobs differ"
            answer.logprob_positions.append(position)
        if entry.input_logprobs is not None:
            known_of_prompt = entry.input_logprobs.unpack()
            assert answer.input_logprobs in (None, known_of_prompt), "repeated input logprobs differ"
            answer.input_logprobs = known_of_prompt
            answer.logprob_positions.append(-1)

    def _add_token(self, answer: Answer, position: int, token: int) -> None:
        if position < len(answer.token_ids):
            assert answer.token_ids[position] == token, "a repeated position differs"
            return
        answer.ahead[position] = token
        while len(answer.token_ids) in answer.ahead:
            answer.token_ids.append(answer.ahead.pop(len(answer.token_ids)))


class ClusterPeering:
    """Connects prefill nodes at once, and again when a decode node has returned."""

    def __init__(self, network: FakeNetwork, name: str) -> None:
        self.network, self.name = network, name
        self.connected: set[str] = set()

    def set_peers(self, router: str, nodes: Sequence[NodeRef]) -> None:
        for node in nodes:
            self.ensure(node)

    @property
    def unreachable(self) -> dict[str, str]:
        return {}

    def ensure(self, node: NodeRef) -> None:
        if node.incarnation not in self.connected and node.incarnation in self.network._parties:
            self.connected.add(node.incarnation)
            self.network.connect(self.name, node.incarnation)


class Node:
    """One scheduler over the real transfer and the engine of the test."""

    def __init__(
        self,
        network: FakeNetwork,
        name: str,
        role: Role,
        engine: Engine,
        config: NodeConfig,
        options: TransferOptions,
        make_transports: MakeTransports,
    ) -> None:
        self._make_transports = make_transports
        engine = replace(engine, clock=network.clock)
        self.name, self.role, self.engine = name, role, engine
        self.alive = True
        wake = threading.Event()
        self.vitals = Vitals(engine.ledger, engine.progress, network.clock)
        outbox = network.join(
            name,
            self._on_message,
            on_connected=lambda peer: self.side.on_connected(peer),  # type: ignore[union-attr]
            on_disconnected=self._on_disconnected,
        )
        hello = NodeHello(ref(name), role, engine.layout, engine.limits, {}, PROTOCOL_VERSION)
        self.router_port = RouterPort(outbox, hello, self.vitals.load, wake, network.clock)
        own = Endpoint(
            node=ref(name),
            layout=engine.layout,
            pages=engine.pool,
            outbox=outbox,
            transports=make_transports(network, name, options),
            clock=network.clock,
            options=options,
            wake=wake.set,
        )
        self.side: KVSender | KVReceiver
        self.sender: KVSender
        self.receiver: KVReceiver
        self.scheduler: PrefillScheduler | DecodeScheduler
        if role is Role.PREFILL:
            self.side = self.sender = KVSender(own)
            self.receiver = self._join_receiver(network, own)
            self.peering = ClusterPeering(network, name)
        else:
            self.side = self.receiver = KVReceiver(own)
            self.sender = self._join_sender(network, own)
            self.peering = ClusterPeering(network, sender_of(name))
        network.every(self.receiver.renewal_s, self.receiver.renew_leases, owner=name)
        parts = NodeParts(
            config=replace(config, net=replace(config.net, router_timeout_s=1e9)),
            engine=engine,
            transfer=TransferSides(self.sender, self.peering, self.receiver),  # type: ignore[arg-type]
            router_port=self.router_port,
            vitals=self.vitals,
            wake=wake,
        )
        self.scheduler = (PrefillScheduler if role is Role.PREFILL else DecodeScheduler)(parts)

    def _join_receiver(self, network: FakeNetwork, own: Endpoint) -> KVReceiver:
        name = receiver_of(self.name)
        outbox = network.join(name, lambda peer, message: self.receiver.on_message(peer, message))
        transports = self._make_transports(network, name, own.options)
        return KVReceiver(replace(own, node=ref(name), outbox=outbox, transports=transports))

    def _join_sender(self, network: FakeNetwork, own: Endpoint) -> KVSender:
        name = sender_of(self.name)
        outbox = network.join(
            name,
            lambda peer, message: self.sender.on_message(peer, message),
            on_connected=lambda peer: self.sender.on_connected(peer),
            on_disconnected=self._on_target_lost,
        )
        transports = self._make_transports(network, name, own.options)
        return KVSender(replace(own, node=ref(name), outbox=outbox, transports=transports))

    def _on_target_lost(self, peer: str, reason: str) -> None:
        self.peering.connected.discard(peer)
        self.sender.on_disconnected(peer, reason)

    def _on_message(self, peer: str, message: object) -> None:
        if peer == ROUTER:
            self.router_port.on_message(peer, message)  # type: ignore[arg-type]
        else:
            self.side.on_message(peer, message)  # type: ignore[arg-type]

    def _on_disconnected(self, peer: str, reason: str) -> None:
        self.peering.connected.discard(peer)
        if peer != ROUTER and isinstance(self.side, KVSender):
            self.side.on_disconnected(peer, reason)


class Cluster:
    """A fleet such as 2P1D. In a step, each node takes one turn, and then time passes."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        make_engine: MakeEngine,
        config: NodeConfig,
        *,
        decode_config: NodeConfig | None = None,
        seed: int = 0,
        faults: Faults | None = None,
        options: TransferOptions | None = None,
        make_transports: MakeTransports = fake_transports,
    ) -> None:
        self._make_transports = make_transports
        self.network = FakeNetwork(seed=seed, faults=faults)
        self.options = options or TransferOptions()
        self.router = ScriptedRouter(self.network)
        self.nodes: dict[str, Node] = {}
        self._make_engine = make_engine
        self._configs = {Role.PREFILL: config, Role.DECODE: decode_config or config}
        for i in range(num_decode):
            self.start(f"d{i}", Role.DECODE)
        for i in range(num_prefill):
            self.start(f"p{i}", Role.PREFILL)

    def start(self, name: str, role: Role, engine: Engine | None = None) -> None:
        config = self._configs[role]
        engine = engine or self._make_engine(config)
        self.nodes[name] = Node(self.network, name, role, engine, config, self.options, self._make_transports)

    def kill(self, name: str) -> None:
        self.nodes[name].alive = False
        self._remove(self.nodes[name])

    def _remove(self, node: Node) -> None:
        self.network.kill(node.name)
        self.network.kill((sender_of if node.role is Role.DECODE else receiver_of)(node.name))

    def stop(self, name: str) -> Engine:
        """Close the scheduler of a node and remove the node from the network. Returns its engine."""
        node = self.nodes.pop(name)
        node.scheduler.close(f"{name} is closed")
        self._remove(node)
        return node.engine

    @property
    def live(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def step(self, seconds: float = 0.002, *, check: bool = True) -> None:
        for node in self.live:
            node.scheduler.step()
            if check:
                audit(node.engine.ledger)
        self.network.advance(seconds)

    def run(self, until: Callable[[], bool], *, max_steps: int = 20_000, check: bool = False) -> int:
        for n in range(max_steps):
            if until():
                return n
            self.step(check=check)
        raise AssertionError(f"not reached in {max_steps} steps: {self.describe()}")

    def run_all(self, *, max_steps: int = 20_000, check: bool = False) -> None:
        """Run until every request has ended and every live node is empty."""
        self.run(
            lambda: (
                all(a.ended for a in self.router.answers.values())
                and all(
                    not node.scheduler.reqs and node.scheduler._launcher.in_flight is None
                    for node in self.live
                )
            ),
            max_steps=max_steps,
            check=check,
        )

    def tokens(self, key: ReqKey) -> list[int]:
        answer = self.router.answers[key]
        assert not answer.failures, answer.failures
        return answer.token_ids

    def assert_idle(self) -> None:
        """Assert that no live node has a request or holds a page."""
        self.step()
        for node in self.live:
            assert not node.scheduler.reqs
            audit_idle(node.engine.ledger)
            self.router.outbox.send(node.name, Ping(1))
        self.step()

    def describe(self) -> str:
        rows = [f"{key}: {len(a.token_ids)} tokens" for key, a in self.router.answers.items() if not a.ended]
        rows += [f"{n.name}: {len(n.scheduler.reqs)} reqs, {n.engine.ledger.count()}" for n in self.live]
        return "; ".join(rows)

    def close(self) -> None:
        for node in self.live:
            node.scheduler.close("the test is over")
            node.engine.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
