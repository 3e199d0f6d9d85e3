"""The process of a node: load the model, run the loop of its role until told to stop, close everything.

When routers change the role, the loop and every connection end, and those of the other role begin over the same
loaded model, at the same address, under a new incarnation.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from types import FrameType
from typing import Protocol

import msgspec

from shared import log
from shared.config import NodeConfig
from shared.engine.build import Engine, build_engine
from shared.engine.loop_parts import NodeParts
from shared.engine.node_http import InRole, NodeHttp, NodeStatus
from shared.engine.resolve import resolve_device, resolve_schedule
from shared.engine.vitals import Vitals
from shared.errors import ConfigError
from shared.kvtransfer.endpoint import Endpoint
from shared.kvtransfer.sides import make_sides
from shared.kvtransfer.transports.choice import Transports, make_transports
from shared.open_files import raise_open_files_limit
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.join_announcer import JoinAnnouncer
from shared.protocol.loopback import require_key_beyond_loopback
from shared.protocol.messages import PROTOCOL_VERSION, LoadFailed, NodeHello, NodeRef, Role, RouterToNode
from shared.protocol.resolver import Resolver, warn_unless_resolved
from shared.protocol.router_port import RouterPort
from shared.protocol.security import FleetKey

SWITCH_INTERVAL_S = 1e-4
"""A thread that wants the GIL asks for it after so long, not after Python's 5 ms.

A native forward that has ended needs the GIL to say so, while the scheduler plans the next step: at 5 ms nothing of
that planning was hidden behind forwards of a few ms, at 0.1 ms nine tenths of it (2 cores, AVX-512, llama-160m).
"""
CUDA_QUEUES = "32"
"""CUDA_DEVICE_MAX_CONNECTIONS, where the operator has not set it. CUDA reads it once, when it is initialized.

Streams share hardware queues when there are more of them than queues, 8 by default: a receive of NCCL that spins for
a slow peer would stand before forwards.
"""
ANY_HOST = ("0.0.0.0", "::", "*")


IDLE_WAIT_S = 0.05
"""How long a scheduler that has nothing to compute sleeps, unless it is woken."""


class Scheduler(Protocol):
    """A role's loop, one turn at a time. Every call comes from one thread."""

    @property
    def reqs(self) -> Sized:
        """The requests that this node has accepted and that have not ended."""
        ...

    def step(self) -> bool:
        """Take one turn: hear, plan, turn, account, speak. False when it has nothing left to do."""
        ...

    def close(self, reason: str) -> None:
        """Fail every request and bring every page home. The engine stays, for another scheduler to use."""
        ...


BuildRole = Callable[[NodeParts], Scheduler]
"""Makes a role's scheduler."""


def builder_of(role: Role) -> BuildRole:
    """The scheduler of `role`. It is found by the name of the role's package, which only a node in it imports."""
    build_role: BuildRole = getattr(import_module(f"{role}_node.scheduler"), f"{role.capitalize()}Scheduler")
    return build_role


def run_node(role: Role, config: NodeConfig, builder_of: Callable[[Role], BuildRole] = builder_of) -> int:
    """Load, serve until told to stop, shut down. Returns the exit code; 2 for a ConfigError.

    The node begins in `role`, and routers may change that.
    """
    log.setup(config.log_level, config.net.node_id or role)
    stop = StopRequest(config.net.exit_with_parent)
    try:
        return _serve(role, config, builder_of, stop)
    except ConfigError as error:
        print(f"{role}-node: {error}", file=sys.stderr)
        return 2


def _serve(role: Role, config: NodeConfig, builder_of: Callable[[Role], BuildRole], stop: StopRequest) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_open_files_limit()  # each peer has several sockets, and gloo aborts a process that has no file left
    net = config.net
    fleet_key = FleetKey.load(net.fleet_key)
    require_key_beyond_loopback("--host", net.host, has_key=fleet_key is not None, insecure=net.insecure)
    advertised = net.advertise_host or net.host
    if advertised in ANY_HOST:
        raise ConfigError(
            f"--host {net.host}: say with --advertise-host under which name others reach this node"
        )
    warn_unless_resolved(advertised, Resolver())
    config = replace(config, transfer=replace(config.transfer, bind_host=advertised))
    loaded: _Loaded | None = None
    next_role: Role | None = role
    status = NodeStatus(config.model.model, time.monotonic)
    with ExitStack() as exits:
        if net.http_port is not None:
            exits.enter_context(NodeHttp(net.http_host, net.http_port, status))
        while next_role is not None:
            with presence_of(next_role, config, advertised, fleet_key) as presence:
                if loaded is None:
                    loaded = _load(config, presence)
                    exits.callback(loaded.engine.close)
                    # The node keeps its name and its port in the other role.
                    own = replace(net, node_id=presence.node.node_id, port=presence.port)
                    schedule = resolve_schedule(config.schedule, loaded.engine.pool.device)
                    config = replace(config, net=own, schedule=schedule)
                next_role = _serve_in_role(presence, config, loaded, builder_of(next_role), stop, status)
    return 0


@dataclass(frozen=True, kw_only=True)
class Presence:
    """What routers and other nodes see of this node in one role. In the next role it is another node to them."""

    role: Role
    node: NodeRef
    port: int
    control: ControlThread
    announcer: JoinAnnouncer


@contextmanager
def presence_of(
    role: Role, config: NodeConfig, advertised: str, fleet_key: FleetKey | None
) -> Iterator[Presence]:
    """Take the control port and announce the node. Every connection is closed in the end."""
    net = config.net
    control = ControlThread(fleet_key)
    try:
        port = control.bind(net.host, net.port)
        node_id = net.node_id or f"{role}-{advertised}-{port}"
        node = NodeRef(node_id, f"{node_id}#{secrets.token_hex(4)}", f"tcp://{advertised}:{port}")
        control.start()
        announcer = JoinAnnouncer(control, node, role, net.routers)
        try:
            yield Presence(role=role, node=node, port=port, control=control, announcer=announcer)
        finally:
            announcer.stop()
    finally:
        control.close()


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """What a node keeps when its role changes."""

    engine: Engine
    transports: Transports


def _load(config: NodeConfig, presence: Presence) -> _Loaded:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", CUDA_QUEUES)
    try:
        # Options are checked first, since a model takes minutes to load.
        transports = make_transports(config.transfer, resolve_device(config.model.device))
        decodes = presence.role is Role.DECODE or not config.net.fixed_role
        engine = build_engine(config, presence.announcer.loading, decodes=decodes)
    except ConfigError as error:
        presence.announcer.say(LoadFailed(presence.node.node_id, presence.role, str(error)))
        raise
    return _Loaded(engine=engine, transports=transports)


def _serve_in_role(
    presence: Presence,
    config: NodeConfig,
    loaded: _Loaded,
    build_role: BuildRole,
    stop: StopRequest,
    status: NodeStatus,
) -> Role | None:
    """Serve until told to stop, or to take the role that is returned."""
    role, node = presence.role, presence.node
    log.rename(node.incarnation)
    parts = node_parts(presence, config, loaded.engine, loaded.transports, stop.wake)
    scheduler = build_role(parts)
    routers = Handlers(msgspec.msgpack.Decoder(RouterToNode), parts.router_port.on_message)
    presence.control.admit({"router": routers, **parts.transfer.handlers()})
    presence.announcer.start()
    status.serves(
        InRole(
            role=role,
            node_id=node.node_id,
            load=parts.vitals.load,
            is_draining=lambda: parts.router_port.is_draining,
        )
    )
    log.event("listening", role=role, node=node.incarnation, address=node.address)
    stop.loaded()
    loaded.engine.grammars.warm_up()
    next_role = None
    reason = f"{role} node {node.node_id} is shutting down"
    try:
        next_role = _run(scheduler, stop, parts.router_port, config.net.drain_timeout_s)
        if next_role is not None:
            reason = f"{role} node {node.node_id} becomes a {next_role} node"
    except Exception as error:
        reason = f"{role} node {node.node_id} failed: {type(error).__name__}: {error}"
        parts.router_port.leave(reason, crashed=True)  # routers note it with the requests that are here
        raise
    finally:
        status.serves_not(reason)
        presence.announcer.stop()
        scheduler.close(reason)
        parts.transfer.close()
    log.event("stopped" if next_role is None else "role_left", node=node.incarnation)
    return next_role


def _run(
    scheduler: Scheduler, stop: StopRequest, router_port: RouterPort, drain_timeout_s: float
) -> Role | None:
    """Step until told to stop, and then until the requests have left, or until the node is to take another role.

    Returns that role. Sleeps while there is nothing to do.
    """
    stops_at = float("inf")
    while not stop.event.is_set() or (scheduler.reqs and not stop.at_once and time.monotonic() < stops_at):
        if stop.event.is_set() and stops_at == float("inf"):
            stops_at = time.monotonic() + drain_timeout_s
            router_port.drain(drain_timeout_s)
        if not scheduler.step():
            stop.wake.wait(IDLE_WAIT_S)
            stop.wake.clear()
        if (next_role := router_port.take_role()) is not None:
            return next_role
    return None


def node_parts(
    presence: Presence, config: NodeConfig, engine: Engine, transports: Transports, wake: threading.Event
) -> NodeParts:
    """What the loop of the role is built of, over `engine` and the sockets of `presence`."""
    node, control = presence.node, presence.control
    vitals = Vitals(engine.ledger, engine.progress, engine.clock)
    flags = {
        **asdict(config.model),
        **asdict(config.cache),
        **asdict(config.schedule),
        "cpu_cores": str(engine.cpu_cores),
        "device": str(engine.pool.device),
        "dtype": engine.layout.dtype,
        "kv_cache_dtype": engine.layout.kv_cache_dtype or engine.layout.dtype,
        "attention_backend": engine.attention_backend,
        "numerics": engine.layout.numerics,
        "kv_transfer": config.transfer.backend,
        "fixed_role": config.net.fixed_role,
        "host_kv_tokens": engine.ledger.host.num_pages * engine.layout.page_size,
    }
    hello = NodeHello(
        node,
        presence.role,
        engine.layout,
        engine.limits,
        flags,
        PROTOCOL_VERSION,
        config.net.fixed_role,
        engine.is_exact,
    )
    return NodeParts(
        config=config,
        engine=engine,
        transfer=make_sides(
            Endpoint(
                node=node,
                layout=engine.layout,
                pages=engine.pool,
                outbox=control.to_dialled,
                transports=transports,
                clock=engine.clock,
                options=config.transfer,
                wake=wake.set,
            ),
            control,
        ),
        router_port=RouterPort(control.to_diallers, hello, vitals.load, wake, engine.clock),
        vitals=vitals,
        wake=wake,
    )


class StopRequest:
    """SIGTERM, SIGINT, or the end of standard input where the node is to end with its parent.

    While the model loads, a request to stop ends the process at once. Later the first sets `event`, and a second, or
    the end of the parent, `at_once`.
    """

    def __init__(self, exit_with_parent: bool) -> None:
        self.event = threading.Event()
        self.at_once = False
        self.wake = threading.Event()
        self._loading = True
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        if exit_with_parent:
            threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()

    def loaded(self) -> None:
        """Let later signals set `event` and `at_once` alone, at which the loop looks."""
        self._loading = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.at_once = self.at_once or self.event.is_set()
        self.event.set()  # not `wake`: the loop may hold its lock at this very moment, and wakes up by itself
        if self._loading:
            raise SystemExit(0)

    def _watch_parent(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        self.at_once = True
        os.kill(os.getpid(), signal.SIGTERM)
