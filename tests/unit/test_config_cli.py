"""The command line of a node: every flag reaches one field of the configuration, and is handed on by `--local`."""

from __future__ import annotations

import argparse
from dataclasses import fields, is_dataclass

import pytest

from shared.cli import add_node_flags, node_argv, node_config
from shared.config import NodeConfig
from shared.cpu_cores import CpuCores
from shared.flags import fraction, options_of, whole
from tests.forked import node_parser


def local_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_node_flags(parser)
    return parser


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if "--help" not in action.option_strings]


def parsed(action: argparse.Action, text: str) -> object:
    return action.type(text) if callable(action.type) else text


def other_value(action: argparse.Action) -> str | None:
    """A value that the flag takes and that is not its default; None for a flag without a value."""
    if action.nargs == 0:
        return None
    for text in (*map(str, action.choices or ()), "any:1", "7.5", "0.3", "7", "5000"):
        try:
            value = parsed(action, text)
        except argparse.ArgumentTypeError:
            continue
        if value != action.default:
            return text
    raise AssertionError(f"nothing is known that {action.option_strings[0]} takes")


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


def test_no_flag_gives_the_defaults_of_the_configuration() -> None:
    ours, defaults = flat(node_config(node_parser(7100), [])), flat(NodeConfig())
    assert ours.pop("net.port") == 7100
    assert defaults.pop("net.port") == 0
    assert ours == defaults


@pytest.mark.parametrize("action", actions(local_parser()), ids=lambda action: action.option_strings[0])
def test_a_node_flag_reaches_one_field_and_is_handed_on(action: argparse.Action) -> None:
    flag, value = action.option_strings[0], other_value(action)
    argv = [flag] if value is None else [flag, value]
    before, after = (flat(options_of(NodeConfig, node_parser().parse_args(given))) for given in ([], argv))
    changed = [name for name in before if before[name] != after[name]]
    assert len(changed) == 1, changed
    assert str(after[changed[0]]) == str(True if value is None else parsed(action, value))
    assert node_argv(local_parser().parse_args(argv)) == argv


def test_all_node_flags_together_make_the_round_trip() -> None:
    values = {action.option_strings[0]: other_value(action) for action in actions(local_parser())}
    argv = [word for flag, value in values.items() for word in (flag, value) if word is not None]
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
    ("flag", "value"),
    [
        ("--page-size", "0"),
        ("--page-size", "1025"),
        ("--page-size", "x"),
        ("--max-total-tokens", "0"),
        ("--context-length", "1.5"),
        ("--mem-fraction-static", "1.0"),
        ("--mem-fraction-static", "nan"),
        ("--mem-fraction-static", "half"),
        ("--cpu-cores", "any:0"),
        ("--chunked-prefill-size", "0"),
        ("--max-prefill-tokens", "-1"),
        ("--max-running-requests", "0"),
        ("--schedule-conservativeness", "-0.1"),
        ("--schedule-policy", "lifo"),
        ("--random-seed", "-1"),
        ("--in-batch-prefix-caching-deprioritize-threshold", "0"),
        ("--priority-scheduling-preemption-threshold", "-1"),
        ("--priority-aging-steps", "-1"),
        ("--num-reserved-decode-tokens", "-1"),
        ("--retract-every", "-1"),
        ("--host-kv-tokens", "-1"),
        ("--retract-policy", "swap"),
        ("--retracted-wait-steps", "-1"),
        ("--dtype", "int8"),
        ("--kv-transfer", "nixl"),
        ("--kv-slot-bytes", "4095"),
        ("--kv-slots", "65"),
        ("--kv-port", "65536"),
        ("--ready-timeout-s", "0"),
        ("--transfer-timeout-s", "inf"),
        ("--lease-s", "0.4"),
        ("--peer-timeout-s", "0.4"),
        ("--router-timeout-s", "0.4"),
        ("--port", "65536"),
        ("--log-level", "loud"),
    ],
)
def test_out_of_bounds_is_refused_with_the_flag_named(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        node_parser().parse_args([flag, value])
    assert caught.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith(f"prefill-node: error: argument {flag}")
    assert "prefill-node --help" in message


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--kv-transfer gloo --kv-tls", "--kv-transfer tcp"),
        ("--kv-port 7300", "--kv-transfer tcp"),
        ("--kv-transfer tcp --kv-tls", "--kv-tls: "),
    ],
)
def test_flags_that_lack_another_one_are_refused(
    capsys: pytest.CaptureFixture[str], flags: str, named: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        node_config(node_parser(), flags.split())
    assert caught.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith("prefill-node: error: --kv-")
    assert named in message


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    """An abbreviation would change its meaning when a flag is added."""
    with pytest.raises(SystemExit):
        node_parser().parse_args(["--max-total", "64"])
    assert "arguments: --max-total" in capsys.readouterr().err


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
