"""The command line of a node is a contract: its flags are frozen here, and every one reaches the configuration."""

from __future__ import annotations

import argparse
from dataclasses import fields, is_dataclass

import pytest

from shared.cli import (
    add_fleet_flags,
    add_log_flags,
    add_net_flags,
    add_node_flags,
    make_parser,
    node_argv,
    node_config,
)
from shared.config import NodeConfig
from shared.cpu_cores import CpuCores
from shared.flags import FlagParser, fraction, options_of, whole

FLAGS = """\
--host HOST = 127.0.0.1
--port PORT = 7100
--advertise-host HOST
--node-id NODE_ID
--router HOST[:PORT] +
--exit-with-parent
--http-port PORT
--http-host HOST = 127.0.0.1
--drain-timeout-s DRAIN_TIMEOUT_S = 30.0
--model --model-path DIR_OR_HUB_ID = builtin
--load-format {auto,dummy} = auto
--device DEVICE = auto
--dtype {auto,float32,bfloat16,float16} = auto
--context-length TOKENS
--cpu-cores LIST
--attention-backend {auto,native,torch,triton} = auto
--exact
--cuda-graph-max-bs N = 256
--disable-cuda-graph
--page-size TOKENS = 16
--max-total-tokens TOKENS
--mem-fraction-static MEM_FRACTION_STATIC
--gpu-memory-timeout-s GPU_MEMORY_TIMEOUT_S = 60.0
--disable-radix-cache
--host-kv-tokens TOKENS
--chunked-prefill-size TOKENS
--short-prompt-share SHARE = 0.5
--prefill-ahead-share SHARE = 0.25
--max-prefill-tokens TOKENS = 16384
--max-running-requests N = 64
--schedule-policy {fcfs,lpm,dfs-weight,lof,random,routing-key} = fcfs
--enable-mixed-chunk
--random-seed SEED = 0
--in-batch-prefix-caching-deprioritize-threshold TOKENS = 32
--enable-priority-scheduling
--schedule-low-priority-values-first
--priority-scheduling-preemption-threshold DIFFERENCE = 10
--priority-aging-steps STEPS = 256
--schedule-conservativeness SCHEDULE_CONSERVATIVENESS = 1.0
--num-reserved-decode-tokens TOKENS = 32
--disable-overlap-schedule
--retract-policy {auto,host,recompute} = auto
--retracted-wait-steps STEPS = 16
--grammar-backend {xgrammar,none} = xgrammar
--grammar-compile-timeout-s GRAMMAR_COMPILE_TIMEOUT_S = 30.0
--enable-jump-forward
--debug-checks
--retract-every STEPS = 0
--kv-transfer {auto,cuda-ipc,shm,nccl,gloo,tcp} = auto
--kv-port PORT = 0
--kv-tls
--kv-tls-cert FILE
--kv-tls-key FILE
--kv-tls-ca FILE
--allow-mixed-numerics
--kv-slot-bytes BYTES
--kv-slots N = 4
--ready-timeout-s READY_TIMEOUT_S = 600.0
--offer-timeout-s OFFER_TIMEOUT_S = 600.0
--transfer-timeout-s TRANSFER_TIMEOUT_S = 30.0
--lease-s LEASE_S = 15.0
--peer-timeout-s PEER_TIMEOUT_S = 5.0
--router-timeout-s ROUTER_TIMEOUT_S = 10.0
--fixed-role
--profile-dir DIR = baton-profiles
--fleet-key FILE +
--insecure
--log-level {debug,info,warning,error} = info
"""

VALUES = {
    "--model": "some/model",
    "--load-format": "dummy",
    "--device": "cuda:1",
    "--dtype": "float16",
    "--context-length": "777",
    "--cpu-cores": "any:1",
    "--attention-backend": "torch",
    "--exact": None,
    "--cuda-graph-max-bs": "48",
    "--disable-cuda-graph": None,
    "--page-size": "32",
    "--max-total-tokens": "5000",
    "--mem-fraction-static": "0.5",
    "--gpu-memory-timeout-s": "7.5",
    "--disable-radix-cache": None,
    "--host-kv-tokens": "4096",
    "--chunked-prefill-size": "100",
    "--short-prompt-share": "0.25",
    "--prefill-ahead-share": "0.4",
    "--max-prefill-tokens": "2000",
    "--max-running-requests": "9",
    "--schedule-policy": "lpm",
    "--enable-mixed-chunk": None,
    "--random-seed": "77",
    "--in-batch-prefix-caching-deprioritize-threshold": "48",
    "--enable-priority-scheduling": None,
    "--schedule-low-priority-values-first": None,
    "--priority-scheduling-preemption-threshold": "3",
    "--priority-aging-steps": "99",
    "--schedule-conservativeness": "0.25",
    "--num-reserved-decode-tokens": "4",
    "--disable-overlap-schedule": None,
    "--retract-policy": "host",
    "--retracted-wait-steps": "7",
    "--grammar-backend": "none",
    "--grammar-compile-timeout-s": "2.5",
    "--enable-jump-forward": None,
    "--debug-checks": None,
    "--retract-every": "5",
    "--kv-transfer": "nccl",
    "--kv-port": "7300",
    "--kv-tls": None,
    "--kv-tls-cert": "cert.pem",
    "--kv-tls-key": "key.pem",
    "--kv-tls-ca": "ca.pem",
    "--allow-mixed-numerics": None,
    "--kv-slot-bytes": "65536",
    "--kv-slots": "2",
    "--ready-timeout-s": "1.5",
    "--offer-timeout-s": "7.5",
    "--transfer-timeout-s": "2.5",
    "--lease-s": "3.5",
    "--peer-timeout-s": "4.5",
    "--router-timeout-s": "6.5",
    "--fixed-role": None,
    "--profile-dir": "/somewhere",
}
"""Of every flag that `router --local` hands on, a value that is not the default."""


def node_parser() -> FlagParser:
    parser = make_parser("prefill-node", "A node.")
    add_net_flags(parser, 7100)
    add_node_flags(parser)
    add_fleet_flags(parser)
    add_log_flags(parser)
    return parser


def local_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_node_flags(parser)
    return parser


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if "--help" not in action.option_strings]


def describe(action: argparse.Action) -> str:
    """One line: names, what follows, the default, and a plus where it repeats."""
    words = list(action.option_strings)
    if action.nargs != 0:
        choices = "{" + ",".join(action.choices) + "}" if action.choices else None
        words.append(choices or str(action.metavar or action.dest.upper()))
    if isinstance(action, argparse._AppendAction):
        words.append("+")
    elif action.default not in (None, "") and action.nargs != 0:
        words += ["=", str(action.default)]
    return " ".join(words)


def flat(part: object) -> dict[str, object]:
    """Every field of a configuration by its path."""
    values: dict[str, object] = {}
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if is_dataclass(value) and not isinstance(value, CpuCores):
            values |= {f"{field.name}.{name}": v for name, v in flat(value).items()}
        else:
            values[field.name] = value
    return values


def test_the_flags_are_frozen() -> None:
    assert "".join(describe(action) + "\n" for action in actions(node_parser())) == FLAGS


def test_no_flag_gives_the_defaults_of_the_configuration() -> None:
    ours, defaults = flat(node_config(node_parser(), [])), flat(NodeConfig())
    assert ours.pop("net.port") == 7100
    assert defaults.pop("net.port") == 0
    assert ours == defaults


def test_every_node_flag_has_a_value_here() -> None:
    assert [action.option_strings[0] for action in actions(local_parser())] == list(VALUES)


@pytest.mark.parametrize("flag", VALUES)
def test_a_node_flag_reaches_one_field_and_is_handed_on(flag: str) -> None:
    value = VALUES[flag]
    argv = [flag] if value is None else [flag, value]
    before, after = (flat(options_of(NodeConfig, node_parser().parse_args(given))) for given in ([], argv))
    changed = [name for name in before if before[name] != after[name]]
    assert len(changed) == 1, changed
    assert str(after[changed[0]]) == (value or "True")
    assert node_argv(local_parser().parse_args(argv)) == argv


def test_all_node_flags_together_make_the_round_trip() -> None:
    argv = [word for flag, value in VALUES.items() for word in (flag, value) if word is not None]
    handed_on = node_argv(local_parser().parse_args(argv))
    assert node_parser().parse_args(handed_on) == node_parser().parse_args(argv)
    assert node_argv(local_parser().parse_args([])) == []


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        (["--host", "10.0.0.7"], {"net.host": "10.0.0.7"}),
        (["--port", "0"], {"net.port": 0}),
        (["--advertise-host", "me"], {"net.advertise_host": "me"}),
        (["--node-id", "p7"], {"net.node_id": "p7"}),
        (["--router", "a", "--router", "b:9"], {"net.routers": ("a", "b:9")}),
        (["--exit-with-parent"], {"net.exit_with_parent": True}),
        (["--fleet-key", "new", "--fleet-key", "old"], {"net.fleet_key": ("new", "old")}),
        (["--insecure"], {"net.insecure": True}),
        (["--log-level", "debug"], {"log_level": "debug"}),
        (["--model-path", "x"], {"model.model": "x"}),
    ],
)
def test_the_other_flags_reach_theirs(argv: list[str], changes: dict[str, object]) -> None:
    before = flat(node_config(node_parser(), []))
    assert flat(node_config(node_parser(), argv)) == before | changes


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--page-size", "0", "0 is not between 1 and 1024"),
        ("--page-size", "1025", "1025 is not between 1 and 1024"),
        ("--page-size", "x", "'x' is not a whole number"),
        ("--max-total-tokens", "0", "not between"),
        ("--context-length", "1.5", "'1.5' is not a whole number"),
        ("--mem-fraction-static", "1.0", "1.0 is not between 0.01 and 0.99"),
        ("--mem-fraction-static", "nan", "nan is not between"),
        ("--mem-fraction-static", "half", "'half' is not a number"),
        ("--cpu-cores", "any:0", "any:0: 0 threads are not between 1 and"),
        ("--chunked-prefill-size", "0", "not between"),
        ("--max-prefill-tokens", "-1", "not between"),
        ("--max-running-requests", "0", "not between"),
        ("--schedule-conservativeness", "-0.1", "not between"),
        ("--schedule-policy", "lifo", "invalid choice"),
        ("--random-seed", "-1", "not between"),
        ("--in-batch-prefix-caching-deprioritize-threshold", "0", "not between"),
        ("--priority-scheduling-preemption-threshold", "-1", "not between"),
        ("--priority-aging-steps", "-1", "not between"),
        ("--num-reserved-decode-tokens", "-1", "not between"),
        ("--retract-every", "-1", "not between"),
        ("--host-kv-tokens", "-1", "not between"),
        ("--retract-policy", "swap", "invalid choice"),
        ("--retracted-wait-steps", "-1", "not between"),
        ("--dtype", "int8", "invalid choice"),
        ("--kv-transfer", "nixl", "invalid choice"),
        ("--kv-slot-bytes", "4095", "not between"),
        ("--kv-slots", "65", "not between"),
        ("--kv-port", "65536", "not between"),
        ("--ready-timeout-s", "0", "not between"),
        ("--transfer-timeout-s", "inf", "not between"),
        ("--lease-s", "0.4", "not between"),
        ("--peer-timeout-s", "0.4", "not between"),
        ("--router-timeout-s", "0.4", "not between"),
        ("--port", "65536", "65536 is not between 0 and 65535"),
        ("--log-level", "loud", "invalid choice"),
    ],
)
def test_out_of_bounds_is_refused_with_the_flag_named(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, reason: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        node_parser().parse_args([flag, value])
    assert caught.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith(f"prefill-node: error: argument {flag}")
    assert reason in message
    assert "prefill-node --help" in message


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--kv-transfer gloo --kv-tls", "--kv-tls are for --kv-transfer tcp, and it is gloo"),
        ("--kv-port 7300", "--kv-port and --kv-tls are for --kv-transfer tcp, and it is auto"),
        ("--kv-transfer tcp --kv-tls-ca ca.pem", "for --kv-tls, which is not given"),
        ("--kv-transfer tcp --kv-tls", "--kv-tls: certificates are told over the control connections"),
    ],
)
def test_flags_that_lack_another_one_are_refused(
    capsys: pytest.CaptureFixture[str], flags: str, reason: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        node_config(node_parser(), flags.split())
    assert caught.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith("prefill-node: error: --kv-")
    assert reason in message


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    """An abbreviation would change its meaning when a flag is added."""
    with pytest.raises(SystemExit):
        node_parser().parse_args(["--max-total", "64"])
    assert "unrecognized arguments: --max-total" in capsys.readouterr().err


def test_help_groups_the_flags_and_shows_defaults() -> None:
    text = node_parser().format_help()
    for group in ("network:", "model:", "KV cache:", "scheduling:", "KV transfer:", "security:"):
        assert f"\n{group}\n" in text
    for action in actions(node_parser()):
        assert action.help, action.option_strings
        assert action.option_strings[0] in text
    assert "(default: 16384)" in text


def test_bounds_include_both_ends() -> None:
    assert [whole(1, 3)(text) for text in ("1", "3")] == [1, 3]
    assert [fraction(0.5, 1.5)(text) for text in ("0.5", "1.5")] == [0.5, 1.5]
