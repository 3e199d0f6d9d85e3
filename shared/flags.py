"""A flag of a command line is declared once: on the field of the frozen dataclass that it fills."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """What argparse is told of a field. Without `names` the flag is called as the field is."""

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
    """The default of a dataclass's field that is a flag too.

    False makes it a switch. A flag that repeats fills a tuple.
    """
    metadata = {"flag": Flag(help, type, metavar, names, choices, repeats)}
    return field(default=default, metadata=metadata)


class FlagParser(argparse.ArgumentParser):
    """Refuses a wrong flag with one line, where argparse prints the usage of every flag first."""

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
    """Add the flags of the dataclass `options`, or of its fields `only`, as the group `title`, which is returned.

    `choices` are those of fields that `options` itself cannot name.
    """
    group = parser.add_argument_group(title)
    for one, told in _flags(options, only):
        given: dict[str, Any] = {"dest": one.name, "help": told.help, "default": one.default}
        if one.default is False:
            given["action"] = "store_true"
        else:
            given |= {"type": told.type, "metavar": told.metavar}
            given["choices"] = (choices or {}).get(one.name, told.choices)
        if told.repeats:
            given |= {"action": "append", "default": []}
        group.add_argument(*_names(one, told), **given)
    return group


def options_of(options: type[T], args: argparse.Namespace) -> T:
    """The dataclass `options` from parsed flags; a field that is a dataclass is filled likewise."""
    values: dict[str, Any] = {}
    for one in fields(options):  # type: ignore[arg-type]
        if (told := one.metadata.get("flag")) is not None:
            given = getattr(args, one.name)
            values[one.name] = tuple(given) if told.repeats else given
        elif is_dataclass(one.default_factory):
            values[one.name] = options_of(one.default_factory, args)
    return options(**values)


def argv_of(options: type, args: argparse.Namespace, *only: str) -> list[str]:
    """The flags of `options` in `args` that differ from their defaults, as a command line."""
    argv: list[str] = []
    for one, told in _flags(options, only):
        value = getattr(args, one.name)
        if value != one.default:
            argv += [_names(one, told)[0]] if value is True else [_names(one, told)[0], str(value)]
    return argv


def whole(minimum: int, maximum: int = 1 << 40) -> Callable[[str], int]:
    """An argparse type: an int within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not between {minimum} and {maximum}")
        return value

    return parse


def fraction(minimum: float, maximum: float) -> Callable[[str], float]:
    """An argparse type: a float within bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not between {minimum} and {maximum}")
        return value

    return parse


def _flags(options: type, only: Sequence[str]) -> Iterator[tuple[Field[Any], Flag]]:
    for one in fields(options):
        if (told := one.metadata.get("flag")) is not None and (not only or one.name in only):
            yield one, told


def _names(one: Field[Any], told: Flag) -> tuple[str, ...]:
    return told.names or (f"--{one.name.replace('_', '-')}",)
