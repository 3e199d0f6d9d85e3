"""The configuration of a router. Fields are declared with their flags.

MAX_... are the largest values of flags, and bounds of the types of bodies.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from router.topology import LocalTopology
from shared.config import DEFAULT_CONTROL_PORT
from shared.cpu_cores import CpuCores
from shared.flags import flag, fraction, or_auto, whole
from shared.protocol.loopback import require_key_beyond_loopback
from shared.protocol.messages import Role

MAX_ROUTER_WORKERS = 64
_SECONDS = fraction(0.1, 86400.0)


MAX_BATCH_SIZE = 65_536


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """The operator's bounds on one HTTP request, each a flag of the router."""

    max_body_bytes: int = flag(32 << 20, "size of the body", whole(1024), "BYTES")
    max_batch_size: int = flag(
        1024, "sequences: prompts, each as often as its n", whole(1, MAX_BATCH_SIZE), "N"
    )
    max_prompt_tokens: int | None = flag(
        None, "tokens of one prompt; None: what fits context and KV pool of the nodes", whole(1), "TOKENS"
    )


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Options of the HTTP side."""

    host: str = flag("127.0.0.1", "interface that clients reach")
    port: int = flag(8000, "port that clients reach; 0: a free one", whole(0, 65535))
    router_workers: int = flag(
        1,
        "routers that listen on this port, each a process with connections to all nodes",
        whole(1, MAX_ROUTER_WORKERS),
        "N",
    )
    prometheus_port: int = flag(
        0,
        "port on loopback that the first router has to itself, for /metrics, /health and /live; the others take the "
        "next ones; 0: each a free one",
        whole(0, 65535),
        "PORT",
    )
    log_requests: bool = flag(
        False,
        "log an event for each request, when it has ended: ids, counts, times and hashes of prefixes, never text; "
        "router plan reads the log as a trace",
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "send a trace of each sequence there, by OTLP over HTTP, such as http://HOST:4318/v1/traces (needs "
        "baton-serve[otel])",
        metavar="URL",
    )
    served_model_name: str | None = flag(
        None, "what clients call the model; None: as --model", metavar="NAME"
    )
    chat_template: Path | None = flag(None, "jinja template; None: the model's own", Path, "FILE")
    tool_call_parser: str | None = flag(
        None,
        "how the model writes calls of tools, as SGLang and vLLM name it; None: as its chat template says",
        metavar="NAME",
    )
    reasoning_parser: str | None = flag(
        None,
        "think: the model reasons between <think> and </think>; none: it does not; None: as its chat template says",
        choices=("think", "none"),
    )
    skip_tokenizer_init: bool = flag(
        False, "load no tokenizer: prompts are token ids, and answers have token ids and no text"
    )
    allowed_origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = flag(None, "the keys of clients, one a line", Path, "FILE")
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_key_file: Path | None = flag(None, "those of administrators, likewise", Path, "FILE")
    share_cache_across_api_keys: bool = flag(
        False,
        "a prefix that is cached serves the requests of every key; then one key can find out, by guesses, what "
        "another has sent",
    )
    limits: HttpLimits = field(default_factory=HttpLimits)

    def url(self, port: int) -> str:
        """The URL for clients on this machine, when the router listens on `port`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def own_port(self, index: int) -> int:
        """The port that no other router than `index` listens on; 0: a free one."""
        return self.prometheus_port and self.prometheus_port + index


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """The bounds on clients: how many, and how many seconds each part of an exchange may take."""

    max_connections: int = flag(
        8192,
        "clients beyond them get a 503; /health and /metrics are still answered",
        whole(1, 1_000_000),
        "N",
    )
    header_timeout_s: float = flag(
        30.0, "time for the headers of a request, then the client gets a 408", _SECONDS
    )
    body_timeout_s: float = flag(60.0, "time for the body of a request, then the client gets a 408", _SECONDS)
    write_timeout_s: float = flag(
        60.0, "a client that takes nothing of its answer for this long is dropped", _SECONDS
    )
    keep_alive_timeout_s: int = flag(
        30, "a connection without a request is closed after this long", whole(1, 86400)
    )


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Options of the nodes' side. Nodes of `local` are started, those of `join` are dialled."""

    local: LocalTopology
    join: tuple[tuple[Role, str], ...] = ()
    control_host: str = flag("127.0.0.1", "interface of the port where nodes announce themselves")
    control_port: int | None = flag(
        None,
        f"that port; 0: a free one; None: a free one if nodes are started here, else {DEFAULT_CONTROL_PORT}",
        whole(0, 65535),
    )
    discovery: tuple[str, ...] = flag(
        (),
        "where nodes are found: dns:NAME[:PORT] is every address of a name, such as a headless service (PORT: 7200); "
        "may repeat",
        metavar="SOURCE",
        repeats=True,
    )
    fleet_key: tuple[str, ...] = ()
    insecure: bool = False
    node_argv: tuple[str, ...] = ()
    cpu_cores: CpuCores | None = None
    """The cores of all local nodes together; None: those that this process may use."""


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """How requests are placed, and timeouts in seconds."""

    prefill_policy: str = flag("ttft", "which prefill node gets a request")
    decode_policy: str = flag("ttft", "which decode node gets a request")
    local_prefill_tokens: int | None = flag(
        None,
        "a decode node prefills by itself what has at most so many tokens that it does not hold; auto (None): "
        "what it would compute sooner than a prefill node, its other streams considered",
        or_auto(whole(0)),
        "TOKENS",
    )
    max_queued_requests: int = flag(
        4096,
        "most sequences without a first token, nodes' own queues included; others get a 429",
        whole(1),
        "N",
    )
    ttft_limit_s: float | None = flag(
        None,
        "a request whose first token would come later than this gets a 429 at once, by the rates that nodes measure; "
        "None: none does",
        _SECONDS,
        "SECONDS",
    )
    queue_timeout_s: float = flag(600.0, "longest wait for a first token", _SECONDS)
    stall_timeout_s: float = flag(120.0, "longest wait for the next token", _SECONDS)
    failover_timeout_s: float = flag(
        30.0, "how long a request without a decode node, new or running, waits for one", _SECONDS
    )
    node_timeout_s: float = flag(
        10.0, "a node that neither answers nor gets on for this long is lost", _SECONDS
    )
    drain_timeout_s: float = flag(
        30.0, "after SIGTERM, how long running requests may take to finish", _SECONDS
    )
    stop_timeout_s: float = flag(
        10.0, "time for processes to stop by themselves before they are killed", _SECONDS
    )


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """All options of a router. `model` is None if the nodes say which model they serve."""

    model: str | None
    fleet: FleetOptions
    http: HttpOptions = field(default_factory=HttpOptions)
    connections: ConnectionOptions = field(default_factory=ConnectionOptions)
    dispatch: DispatchOptions = field(default_factory=DispatchOptions)
    log_level: str = "info"

    def check(self) -> None:
        """Raise ConfigError for a control port beyond loopback without a key."""
        fleet = self.fleet
        require_key_beyond_loopback(
            "--control-host", fleet.control_host, has_key=bool(fleet.fleet_key), insecure=fleet.insecure
        )

    def shown(self) -> dict[str, object]:
        """The options that /server_info shows, without secrets."""
        return {
            "allowed_origins": list(self.http.allowed_origins),
            "log_requests": self.http.log_requests,
            "host": self.http.host,
            "port": self.http.port,
            "router_workers": self.http.router_workers,
            "local": str(self.fleet.local),
            **asdict(self.http.limits),
            **asdict(self.connections),
            **{name: value for name, value in asdict(self.dispatch).items() if name != "stop_timeout_s"},
        }
