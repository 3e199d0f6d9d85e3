"""Flags to configuration."""

from __future__ import annotations

import asyncio
import itertools
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from router.config import ConnectionOptions, FleetOptions, HttpOptions, RouterConfig
from router.flags import build_parser, router_config
from router.processes.supervisor import Supervisor
from router.server import load_model
from router.topology import LocalTopology, parse_address
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
    flags = ["--model m", "--page-size 8", "--disable-radix-cache", "--fleet-key k"]
    config = config_of("--local", "2p3d", *" ".join(flags).split())
    assert len(config.fleet.local.node_ids()) == 5
    argv = " ".join(config.fleet.node_argv)
    for flag in flags:
        assert flag in argv


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
    ("flag", "value"),
    [
        ("--local", "1P0D"),
        ("--local", "99P99D"),
        ("--local", "two"),
        ("--prefill", "host:notaport"),
        ("--decode", "host:99999"),
        ("--port", "70000"),
        ("--router-workers", "0"),
        ("--queue-timeout-s", "0"),
        ("--local-prefill-tokens", "few"),
    ],
)
def test_flags_that_make_no_sense(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(flag, value)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("router: error: ") and "router --help" in line
    assert flag in line


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--local 1P1D --prefill host", "--local"),
        ("--decode host --cpu-cores any:1", "--cpu-cores"),
        ("--decode host --page-size 8", "--page-size"),
        ("--control-host 0.0.0.0", "--fleet-key"),
    ],
)
def test_flags_that_exclude_each_other(args: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_of(*args.split())
    assert config_of("--control-host", "0.0.0.0", "--insecure").fleet.insecure


def test_a_fleet_is_not_insecure_unless_that_is_said() -> None:
    fleet = FleetOptions(local=LocalTopology(0, 0), control_host="0.0.0.0")
    with pytest.raises(ConfigError, match="--fleet-key"):
        RouterConfig(model=None, fleet=fleet).check()


def test_flags_of_connections() -> None:
    assert config_of().connections == ConnectionOptions()
    given = ConnectionOptions(
        max_connections=7,
        header_timeout_s=1.5,
        body_timeout_s=2.5,
        write_timeout_s=3.5,
        keep_alive_timeout_s=1,
    )
    flags = [(f"--{field.replace('_', '-')}", str(value)) for field, value in asdict(given).items()]
    config = config_of(*itertools.chain(*flags))
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

    # Its owner would share it, as the routers of one supervisor do.
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
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
