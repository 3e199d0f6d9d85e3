"""Declares each flag of a command line once, on the field of the frozen dataclass that it fills."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Flag:
    """The argparse options of a field. Without `names` the flag has the name of the field."""

    help: str
    type: Callable[[str], Any]
    metavar: str | None
    names: tuple[str, ...]
    choices: tuple[str, ...] | None
    repeats: bool


def flag(
    default: T,
    help: str,
    type: Callable[[str], Any] = str,
    metavar: str | None = None,
    *,
    names: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    repeats: bool = False,
) -> T:
    """Declare a field of a dataclass as a flag, with its default.

    The default False makes a switch. A flag that `repeats` fills a tuple.
    """
    metadata = {"flag": Flag(help, type, metavar, names, choices, repeats)}
    return field(default=default, metadata=metadata)


class FlagParser(argparse.ArgumentParser):
    """Refuses a wrong flag with one line. argparse would print the usage of every flag before it."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help shows the flags)\n")


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    options: type,
    *only: str,
    choices: Mapping[str, Sequence[str]] | None = None,
) -> argparse._ArgumentGroup:
    """Add the flags of the dataclass `options`, or of its fields `only`, as a group, and return the group.

    `choices` by field name are for fields whose choices `options` cannot import.
    """
    group = parser.add_argument_group(title)
    for one, spec in _flags(options, only):
        given: dict[str, Any] = {"dest": one.name, "help": spec.help, "default": one.default}
        if one.default is False:
            given["action"] = "store_true"
        else:
            given |= {"type": spec.type, "metavar": spec.metavar}
            given["choices"] = (choices or {}).get(one.name, spec.choices)
        if spec.repeats:
            given |= {"action": "append", "default": []}
        group.add_argument(*_names(one, spec), **given)
    return group


def options_of(options: type[T], args: argparse.Namespace) -> T:
    """Make the dataclass `options` from parsed flags. A field that is a dataclass is made in the same way."""
    values: dict[str, Any] = {}
    for one in fields(options):  # type: ignore[arg-type]
        if (spec := one.metadata.get("flag")) is not None:
            given = getattr(args, one.name)
            values[one.name] = tuple(given) if spec.repeats else given
        elif is_dataclass(one.default_factory):
            values[one.name] = options_of(one.default_factory, args)
    return options(**values)


def argv_of(options: type, args: argparse.Namespace, *only: str) -> list[str]:
    """Return the flags of `options` in `args` that differ from their defaults, as a command line."""
    argv: list[str] = []
    for one, spec in _flags(options, only):
        value = getattr(args, one.name)
        if value != one.default:
            argv += [_names(one, spec)[0]] if value is True else [_names(one, spec)[0], str(value)]
    return argv


def whole(minimum: int, maximum: int = 1 << 40) -> Callable[[str], int]:
    """An argparse type: an int within bounds."""
    return _bounded(int, "a whole number", minimum, maximum)


def fraction(minimum: float, maximum: float) -> Callable[[str], float]:
    """An argparse type: a float within bounds."""
    return _bounded(float, "a number", minimum, maximum)


def or_auto(parse: Callable[[str], N]) -> Callable[[str], N | None]:
    """An argparse type: what `parse` takes, or `auto`, which is None."""

    def parse_or_auto(text: str) -> N | None:
        if text == "auto":
            return None
        try:
            return parse(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, and not auto") from None

    return parse_or_auto


def _bounded(number: Callable[[str], N], kind: str, minimum: N, maximum: N) -> Callable[[str], N]:
    def parse(text: str) -> N:
        try:
            value = number(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not between {minimum} and {maximum}")
        return value

    return parse


def _flags(options: type, only: Sequence[str]) -> Iterator[tuple[Field[Any], Flag]]:
    for one in fields(options):
        if (spec := one.metadata.get("flag")) is not None and (not only or one.name in only):
            yield one, spec


def _names(one: Field[Any], spec: Flag) -> tuple[str, ...]:
    return spec.names or (f"--{one.name.replace('_', '-')}",)
