"""Flags to configuration."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from router.flags import build_parser, router_config
from router.http.config import ConnectionOptions, FleetOptions, HttpOptions, RouterConfig
from router.http.topology import LocalTopology, parse_address
from router.processes.supervisor import Supervisor
from router.server import load_model
from shared.cpu_cores import CpuCores
from shared.errors import ConfigError
from shared.protocol.messages import Role


def config_of(*args: str) -> RouterConfig:
    config = router_config(build_parser().parse_args(args))
    config.check()
    return config


def test_alone_is_one_of_each_with_the_built_in_model() -> None:
    config = config_of()
    assert config.model == "builtin" and str(config.fleet.local) == "1P1D"
    assert config.fleet.local.node_ids() == [(Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-0")]
    assert config.fleet.node_argv == ("--log-level", "info") and config.fleet.cpu_cores is None
    assert (config.http.host, config.http.port, config.fleet.control_port) == ("127.0.0.1", 8000, 0)


def test_node_flags_go_to_the_nodes() -> None:
    args = [
        "--local",
        "2p3d",
        "--model",
        "m",
        "--page-size",
        "8",
        "--disable-radix-cache",
        "--fleet-key",
        "k",
    ]
    config = config_of(*args)
    assert len(config.fleet.local.node_ids()) == 5
    argv = " ".join(config.fleet.node_argv)
    for part in ("--model m", "--page-size 8", "--disable-radix-cache", "--fleet-key k"):
        assert part in argv


def test_the_cores_are_those_of_all_nodes_together() -> None:
    fleet = config_of("--cpu-cores", "any:1").fleet
    assert fleet.cpu_cores == CpuCores(1) and "--cpu-cores" not in fleet.node_argv


def test_joining() -> None:
    config = config_of("--prefill", "a", "--prefill", "b:1", "--decode", "[::1]:5", "--decode", "tcp://c:9")
    assert config.model is None and not config.fleet.local.node_ids() and not config.fleet.node_argv
    assert config.fleet.join == (
        (Role.PREFILL, "tcp://a:7100"),
        (Role.PREFILL, "tcp://b:1"),
        (Role.DECODE, "tcp://[::1]:5"),
        (Role.DECODE, "tcp://c:9"),
    )
    assert config.fleet.control_port == 8001, "nodes elsewhere have to know it"
    assert config_of("--local", "none").fleet.local == LocalTopology(0, 0)
    assert parse_address(Role.DECODE, "10.0.0.1") == "tcp://10.0.0.1:7200"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--local", "1P0D"], "at least one decode node"),
        (["--local", "99P99D"], "at most 64 nodes"),
        (["--local", "two"], "not like 1P1D"),
        (["--prefill", "host:notaport"], "is not HOST[:PORT]"),
        (["--decode", "host:99999"], "is not HOST[:PORT]"),
        (["--port", "70000"], "not between 0 and 65535"),
        (["--router-workers", "0"], "0 is not between 1 and 64"),
        (["--queue-timeout-s", "0"], "not between"),
        (["--local-prefill-tokens", "few"], "'few' is not a whole number, and not auto"),
    ],
)
def test_flags_that_make_no_sense(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(*args)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("router: error: ") and "router --help" in line
    assert message in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--local", "1P1D", "--prefill", "host"], "give one or the other"),
        (["--decode", "host", "--cpu-cores", "any:1"], "--cpu-cores: only for nodes that --local starts"),
        (["--decode", "host", "--page-size", "8"], "--page-size: only for nodes that --local starts"),
        (["--control-host", "0.0.0.0"], "--fleet-key FILE, or --insecure"),
        (["--kv-port", "7300"], "are for --kv-transfer tcp, and it is auto"),
        (
            ["--kv-transfer", "tcp", "--kv-tls"],
            "--kv-tls: certificates are told over the control connections",
        ),
        (
            ["--kv-transfer", "tcp", "--kv-port", "7300"],
            "--kv-port 7300: 2 nodes of one machine cannot share",
        ),
    ],
)
def test_flags_that_exclude_each_other(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*args)
    assert config_of("--control-host", "0.0.0.0", "--insecure").fleet.insecure


def test_flags_of_connections() -> None:
    assert config_of().connections == ConnectionOptions()
    given = ConnectionOptions(
        max_connections=7,
        header_timeout_s=1.5,
        body_timeout_s=2.5,
        write_timeout_s=3.5,
        keep_alive_timeout_s=4,
    )
    config = config_of(
        *("--max-connections", "7", "--header-timeout-s", "1.5", "--body-timeout-s", "2.5"),
        *("--write-timeout-s", "3.5", "--keep-alive-timeout-s", "4"),
    )
    assert config.connections == given
    assert config.shown().items() >= asdict(given).items()


@pytest.mark.parametrize("model", ["/no/such/model", "model/with/slashes/too"])
def test_no_such_model(model: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        load_model(model, config_of())


def test_no_such_chat_template(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(str(model_folder), config_of("--chat-template", "/no/such/template"))


def test_ports_in_use_and_keys_that_are_not_there() -> None:
    async def start(config: RouterConfig) -> None:
        async with Supervisor(config, ()) as supervisor:
            await supervisor.start()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        none = LocalTopology(0, 0)
        for http_port, control_port, key, message in (
            (port, 0, None, "choose another --port"),
            (0, port, None, "the control port"),
            (0, 0, "/no/such/file", "--fleet-key /no/such/file"),
        ):
            config = RouterConfig(
                model=None,
                fleet=FleetOptions(local=none, control_port=control_port, fleet_key=(key,) if key else ()),
                http=HttpOptions(port=http_port),
            )
            with pytest.raises(ConfigError, match=message):
                asyncio.run(start(config))
