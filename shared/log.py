"""Logs events with fields, one per line, on stderr: `12:03:04.120 INFO  retract rid=a freed_tokens=96`."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable

LEVELS = ("debug", "info", "warning", "error")

_LOGGER = logging.getLogger("baton")


def setup(level: str, process: str = "") -> None:
    """Log events of `level` and above on stderr. Each line begins with `process` (a node id, or "router")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(process))
    _LOGGER.handlers[:] = [handler]
    _LOGGER.propagate = False
    _LOGGER.setLevel(level.upper())


def rename(process: str) -> None:
    """Begin each line with `process` from now on. No-op before `setup`."""
    for handler in _LOGGER.handlers:
        handler.setFormatter(_formatter(process))


def _formatter(process: str) -> logging.Formatter:
    name = f"[{process}] " if process else ""
    return logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)-7s {name}%(message)s", datefmt="%H:%M:%S")


def event(name: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log a state change on one line. Nothing is formatted when the level is off."""
    if not _LOGGER.isEnabledFor(level):
        return
    _LOGGER.log(level, "%s", " ".join([name, *(f"{key}={_quoted(value)}" for key, value in fields.items())]))


def warn(name: str, **fields: object) -> None:
    """Log an event that an operator should look at."""
    event(name, level=logging.WARNING, **fields)


class LimitedWarning:
    """Logs a warning that strangers can cause, at most LIMIT times in LIMIT_S.

    The next line that is logged has the number of skipped warnings in its field `suppressed`. Not thread-safe.
    """

    LIMIT = 5
    LIMIT_S = 10.0

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._resets_at = 0.0
        self._num_left = 0
        self._num_suppressed = 0

    def __call__(self, **fields: object) -> None:
        """Log the event, or count it as suppressed."""
        now = self._clock()
        if now >= self._resets_at:
            self._resets_at, self._num_left = now + self.LIMIT_S, self.LIMIT
        if not self._num_left:
            self._num_suppressed += 1
            return
        self._num_left -= 1
        if self._num_suppressed:
            fields["suppressed"] = self._num_suppressed
            self._num_suppressed = 0
        warn(self._name, **fields)


def crash(name: str, **fields: object) -> None:
    """Log an event with the traceback of the exception that is being handled. For bugs, not for wrong requests."""
    _LOGGER.error("%s", " ".join([name, *(f"{k}={_quoted(v)}" for k, v in fields.items())]), exc_info=True)


def _quoted(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and " " not in text and '"' not in text:
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
