"""What a router was told on its command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from router.http.limits import HttpLimits
from router.http.topology import LocalTopology
from shared.cpu_cores import CpuCores
from shared.protocol.loopback import require_key_beyond_loopback
from shared.protocol.messages import Role

MAX_ROUTER_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """The clients' side."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_key_file: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    log_requests: bool = False
    prometheus_port: int = 0
    """On loopback, of router 0 alone; the next routers take the next ports. 0: each a free one."""
    served_model_name: str | None = None
    chat_template: Path | None = None
    limits: HttpLimits = field(default_factory=HttpLimits)

    def url(self, port: int) -> str:
        """Where clients on this machine reach it, when it listens on `port`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def has_key_files(self) -> bool:
        """True when keys can change while the router runs."""
        return self.api_key_file is not None or self.admin_api_key_file is not None

    def own_port(self, index: int) -> int:
        """The port that no other router than `index` listens on; 0: a free one."""
        return self.prometheus_port and self.prometheus_port + index


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """How long a client may take for each part of an exchange, in seconds, and how many there may be."""

    max_connections: int = 8192
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keep_alive_timeout_s: int = 30


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """The nodes' side. `local` is what to start; `join` what to dial."""

    local: LocalTopology
    join: tuple[tuple[Role, str], ...] = ()
    control_host: str = "127.0.0.1"
    control_port: int = 0
    fleet_key: str | None = None
    insecure: bool = False
    node_argv: tuple[str, ...] = ()
    cpu_cores: CpuCores | None = None
    """Of all local nodes together; None: what this process may use."""


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """How requests are placed, and how long things may take, in seconds."""

    prefill_policy: str = "round_robin"
    decode_policy: str = "cache_aware"
    local_prefill_tokens: int = 16
    max_queued_requests: int = 4096
    queue_timeout_s: float = 600.0
    stall_timeout_s: float = 120.0
    node_timeout_s: float = 10.0
    stop_timeout_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Everything. `model` is None when the nodes are to say what they serve."""

    model: str | None
    fleet: FleetOptions
    router_workers: int = 1
    http: HttpOptions = field(default_factory=HttpOptions)
    connections: ConnectionOptions = field(default_factory=ConnectionOptions)
    dispatch: DispatchOptions = field(default_factory=DispatchOptions)

    def check(self) -> None:
        """Refuse what is dangerous. Raises ConfigError."""
        fleet = self.fleet
        require_key_beyond_loopback(
            "--control-host", fleet.control_host, has_key=fleet.fleet_key is not None, insecure=fleet.insecure
        )

    def shown(self) -> dict[str, object]:
        """For /server_info: without secrets."""
        return {
            "allowed_origins": list(self.http.allowed_origins),
            "log_requests": self.http.log_requests,
            "host": self.http.host,
            "port": self.http.port,
            "router_workers": self.router_workers,
            "local": str(self.fleet.local),
            **asdict(self.http.limits),
            **asdict(self.connections),
            "prefill_policy": self.dispatch.prefill_policy,
            "decode_policy": self.dispatch.decode_policy,
            "local_prefill_tokens": self.dispatch.local_prefill_tokens,
            "max_queued_requests": self.dispatch.max_queued_requests,
            "queue_timeout_s": self.dispatch.queue_timeout_s,
            "stall_timeout_s": self.dispatch.stall_timeout_s,
            "node_timeout_s": self.dispatch.node_timeout_s,
        }
