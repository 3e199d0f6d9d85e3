from __future__ import annotations

import logging
import re

import pytest

from shared import log

pytestmark = pytest.mark.usefixtures("log_restored")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_one_line_with_time_level_process_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("info", "prefill-0")
    log.event("retract", rid="a", freed_tokens=96)
    (line,) = lines(capsys)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    \[prefill-0\] retract rid=a freed_tokens=96", line)


def test_a_flood_of_warnings_is_counted_and_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("info")
    now = 0.0
    warning = log.LimitedWarning("stranger_ignored", lambda: now)
    for i in range(1000):
        warning(stranger=i)
        now += log.LimitedWarning.LIMIT_S / 1000
    written = lines(capsys)
    assert len(written) == log.LimitedWarning.LIMIT
    assert written[-1].endswith(f"stranger_ignored stranger={log.LimitedWarning.LIMIT - 1}")
    now += 1.0
    warning(stranger="late")
    warning(stranger="later")
    assert [line.partition("stranger_ignored ")[2] for line in lines(capsys)] == [
        f"stranger=late suppressed={1000 - log.LimitedWarning.LIMIT}",
        "stranger=later",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("two words", '"two words"'),
        ("", '""'),
        ('say "hi"', r'"say \"hi\""'),
        ('a"b', r'"a\"b"'),
        ("one\ntwo", r'"one\ntwo"'),
        ("tab\there\x1b[0m", r'"tab\there\u001b[0m"'),
        ("zwei Wörter", '"zwei Wörter"'),
        ("100%s", "100%s"),
        ("line\u2028end", r'"line\u2028end"'),
        (None, "None"),
        (3, "3"),
        (0.123456789, "0.1235"),
        (1e9, "1e+09"),
        ((1, 2), '"(1, 2)"'),
        (ValueError("no such file"), '"no such file"'),
    ],
)
def test_values_are_quoted_where_they_need_it(
    capsys: pytest.CaptureFixture[str], value: object, text: str
) -> None:
    log.setup("info")
    log.event("e", x=value)
    (line,) = lines(capsys)
    assert line.endswith(f" e x={text}")


@pytest.mark.parametrize("level", log.LEVELS)
def test_events_below_the_level_are_not_logged(capsys: pytest.CaptureFixture[str], level: str) -> None:
    log.setup(level)
    for name in log.LEVELS:
        log.event(name, level=getattr(logging, name.upper()))
    assert [line.split()[-1] for line in lines(capsys)] == list(log.LEVELS[log.LEVELS.index(level) :])


class Unprintable:
    def __str__(self) -> str:
        raise AssertionError("formatted although nobody reads it")


def test_nothing_is_formatted_when_the_level_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("warning")
    log.event("e", x=Unprintable())
    assert lines(capsys) == []


def test_a_crash_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("info")
    try:
        raise KeyError("lost")
    except KeyError:
        log.crash("leak", pages=3)
    text = lines(capsys)
    assert text[0].endswith("ERROR   leak pages=3")
    assert text[1].startswith("Traceback")
    assert text[-1] == "KeyError: 'lost'"


def test_a_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("info", "one")
    log.setup("info", "two")
    log.event("e")
    (line,) = lines(capsys)
    assert "[two]" in line
