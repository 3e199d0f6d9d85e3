"""The configuration of a router. Fields are declared with their flags."""

from __future__ import annotations

import shlex
import shutil
from argparse import Namespace
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

from router.http.limits import HttpLimits
from router.http.tls import Tls, TlsOptions
from router.http.topology import LocalTopology, ScaledRole, parse_scaled
from shared.config import DEFAULT_CONTROL_PORT
from shared.cpu_cores import CpuCores
from shared.errors import ConfigError
from shared.flags import argv_of, flag, fraction, or_auto, whole
from shared.protocol.loopback import require_key_beyond_loopback
from shared.protocol.messages import Role

MAX_ROUTER_WORKERS = 64
_SECONDS = fraction(0.1, 86400.0)
_MS = fraction(0.1, 3_600_000.0)


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
        "baton-serve[otel]); None: where OTEL_EXPORTER_OTLP_ENDPOINT says, if it is set",
        metavar="URL",
    )
    served_model_name: str | None = flag(
        None, "what clients call the model; None: as --model", metavar="NAME"
    )
    chat_template: Path | None = flag(None, "jinja template; None: the model's own", Path, "FILE")
    skip_tokenizer_init: bool = flag(
        False, "load no tokenizer: prompts are token ids, and answers have token ids and no text"
    )
    allowed_origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = flag(
        None, "the keys of clients, one a line; read again on SIGHUP", Path, "FILE"
    )
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_key_file: Path | None = flag(None, "those of administrators, likewise", Path, "FILE")
    share_cache_across_api_keys: bool = flag(
        False,
        "a prefix that is cached serves the requests of every key; then one key can find out, by guesses, what "
        "another has sent",
    )
    limits: HttpLimits = field(default_factory=HttpLimits)
    tls: TlsOptions = field(default_factory=TlsOptions)

    def url(self, port: int) -> str:
        """The URL for clients on this machine, when the router listens on `port`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "http" if self.tls.ssl_certfile is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def has_files(self) -> bool:
        """True when there are files that are read again on SIGHUP: of API keys, or of the certificate."""
        files = (self.api_key_file, self.admin_api_key_file, self.tls.ssl_certfile)
        return any(file is not None for file in files)

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
        "where nodes are found: dns:NAME[:PORT] (every address of a name, such as a headless service; PORT: 7200) or "
        "k8s (pods, by the selectors; needs baton-serve[k8s]); may repeat",
        metavar="SOURCE",
        repeats=True,
    )
    discovery_namespace: str | None = flag(
        None, "of --discovery k8s; None: the router's own, or kubectl's", metavar="NAMESPACE"
    )
    prefill_selector: str = flag(
        "app.kubernetes.io/component=prefill-node", "labels of the pods of prefill nodes", metavar="LABELS"
    )
    decode_selector: str = flag(
        "app.kubernetes.io/component=decode-node", "labels of the pods of decode nodes", metavar="LABELS"
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
class PlanOptions:
    """What the fleets are to reach, and what their nodes cost: for the planner's advice and the autoscaler."""

    plan_profile: Path | None = flag(
        None,
        "a profile of the nodes (router plan --measure): plan for the traffic of the last ten minutes, and show what "
        "number of nodes would serve it (with --autoscale: change it); needs both SLOs",
        Path,
        "FILE",
    )
    plan_decode_profile: Path | None = flag(None, "of decode nodes, where they differ", Path, "FILE")
    slo_ttft_ms: float | None = flag(None, "longest time to first token", _MS, "MS")
    slo_itl_ms: float | None = flag(None, "longest mean time between the tokens of a request", _MS, "MS")
    good_share: float = flag(0.9, "of the requests that must meet both", fraction(0.01, 1), "SHARE")

    def check(self) -> None:
        """Raise ConfigError for a part without the others."""
        given = (self.plan_profile, self.slo_ttft_ms, self.slo_itl_ms)
        if any(one is None for one in given) and any(one is not None for one in given):
            raise ConfigError("--plan-profile, --slo-ttft-ms and --slo-itl-ms belong together")
        if self.plan_decode_profile is not None and self.plan_profile is None:
            raise ConfigError(
                "--plan-decode-profile needs --plan-profile, which then is that of prefill nodes"
            )

    def argv(self) -> list[str]:
        """The command line of these options."""
        return argv_of(PlanOptions, Namespace(**vars(self)))


@dataclass(frozen=True, kw_only=True)
class AutoscaleOptions:
    """Which fleets change their number of nodes with their load, and how; PlanOptions say by what."""

    autoscale: tuple[ScaledRole, ...] = flag(
        (),
        "keep so many nodes of a role as its load needs, from least to most; may repeat. One router of a fleet may "
        "have this, and no HorizontalPodAutoscaler beside it",
        parse_scaled,
        "ROLE=LEAST..MOST",
        repeats=True,
    )
    autoscale_command: str | None = flag(
        None, "run as CMD add ROLE N, and CMD drain NODE_ID ADDRESS when the node is empty", metavar="CMD"
    )
    autoscale_webhook: str | None = flag(
        None, "post the same there as JSON; None, without a command: decisions are printed", metavar="URL"
    )
    autoscale_settle_s: float = flag(
        60.0, "no two opposite actions, and no two drains, are closer", fraction(1, 86400)
    )
    autoscale_window_s: float = flag(
        300.0, "for so long one node less must have been enough before one is drained", fraction(10, 86400)
    )
    autoscale_interval_s: float = flag(5.0, "between two looks at the fleet", fraction(0.5, 60.0))
    autoscale_timeout_s: float = flag(60.0, "longest run of the command, or wait for the webhook", _SECONDS)
    autoscale_drain_timeout_s: float = flag(
        60.0, "then the requests of a node that is drained go on at others", _SECONDS
    )

    def check(self) -> None:
        """Raise ConfigError for flags that are missing, or that exclude each other."""
        if not self.autoscale:
            given = [
                name for name in ("autoscale_command", "autoscale_webhook") if getattr(self, name) is not None
            ]
            if given:
                raise ConfigError(f"--{given[0].replace('_', '-')} needs --autoscale")
            return
        roles = [scaled.role for scaled in self.autoscale]
        if len(set(roles)) < len(roles):
            raise ConfigError(f"--autoscale: a role is named twice: {', '.join(map(str, self.autoscale))}")
        if self.autoscale_command is not None and self.autoscale_webhook is not None:
            raise ConfigError("--autoscale-command and --autoscale-webhook exclude each other")
        if self.autoscale_command is not None:
            program = next(iter(_words(self.autoscale_command)), "")
            if shutil.which(program) is None:
                raise ConfigError(
                    f"--autoscale-command {self.autoscale_command!r} is not a command: "
                    f"there is no program {program!r} that may be run"
                )
        if self.autoscale_webhook is not None and not _is_http_url(self.autoscale_webhook):
            raise ConfigError("--autoscale-webhook is not like http://HOST[:PORT]/PATH")

    def argv(self) -> list[str]:
        """The command line of these options."""
        scaled = [word for one in self.autoscale for word in ("--autoscale", str(one))]
        others = [one.name for one in fields(self) if one.name != "autoscale"]
        return [*scaled, *argv_of(AutoscaleOptions, Namespace(**vars(self)), *others)]


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False  # of a port that is none


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []  # a quote that is not closed


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """All options of a router. `model` is None if the nodes say which model they serve."""

    model: str | None
    fleet: FleetOptions
    http: HttpOptions = field(default_factory=HttpOptions)
    connections: ConnectionOptions = field(default_factory=ConnectionOptions)
    dispatch: DispatchOptions = field(default_factory=DispatchOptions)
    scaling: AutoscaleOptions = field(default_factory=AutoscaleOptions)
    plan: PlanOptions = field(default_factory=PlanOptions)
    log_level: str = "info"

    def check(self) -> None:
        """Raise ConfigError for a control port beyond loopback without a key, and for options that cannot be."""
        self.plan.check()
        if self.scaling.autoscale and self.plan.plan_profile is None:
            raise ConfigError("--autoscale needs --plan-profile, --slo-ttft-ms and --slo-itl-ms")
        fleet = self.fleet
        require_key_beyond_loopback(
            "--control-host", fleet.control_host, has_key=bool(fleet.fleet_key), insecure=fleet.insecure
        )
        Tls(self.http.tls)
        self.scaling.check()
        if self.scaling.autoscale and self.http.tls.ssl_ca_certs is not None:
            raise ConfigError("--autoscale: the autoscaler has no certificate for --ssl-ca-certs")

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
