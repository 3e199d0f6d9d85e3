"""What every script shares: its checks are functions under @check, and their outcomes go into a file.

Runs in the venv of a client, so it needs nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ["BATON_URL"]
"""A router with a prefill and a decode node, and no API key."""
KEYED_URL = os.environ["BATON_KEYED_URL"]
"""A router that wants KEY, runs one request at a time and lets one wait."""
SCRIPTED_URL = os.environ["BATON_SCRIPTED_URL"]
"""A router whose model, SCRIPTED, calls tools, as tests/clients/scripted.py has it."""
SCRIPTED = "scripted"
KEY = os.environ["BATON_KEY"]
MODEL = os.environ["BATON_MODEL"]
MODEL_FOLDER = Path(os.environ["BATON_MODEL_FOLDER"])
PROMPT = "def read_lines(path):\n    with open(path) as f:\n"
MESSAGES = [
    {"role": "system", "content": "This module holds functions on lists of numbers, all of them tested."},
    {"role": "user", "content": "Return the sum of a list of numbers, or zero if it is empty."},
]
"""More than a page of tokens, so that a second request finds some of them cached."""

Check = Callable[[], Any]
_checks: list[Check] = []


def check(function: Check) -> Check:
    """Run it when the script runs, in the order of the file; it may be a coroutine function."""
    _checks.append(function)
    return function


def main() -> None:
    """Run all checks; exit code 1 when one failed."""
    outcomes = [_outcome(function) for function in _checks]
    Path(os.environ["BATON_OUTCOMES"]).write_text(json.dumps(outcomes))
    sys.exit(any(outcome["error"] for outcome in outcomes))


def _outcome(function: Check) -> dict[str, Any]:
    name = function.__name__
    started = time.monotonic()
    error = None
    try:
        if inspect.iscoroutinefunction(function):
            asyncio.run(function())
        else:
            function()
    except Exception as e:
        traceback.print_exc()
        error = f"{type(e).__name__}: {e}"
    seconds = time.monotonic() - started
    print(f"{'FAIL' if error else 'ok  '} {name} ({seconds:.1f} s)", flush=True)
    return {"name": name, "error": error, "seconds": seconds}


def get(path: str, base: str = URL) -> str:
    """The body of a GET, for what the client under test does not tell."""
    request = urllib.request.Request(f"{base}{path}", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def post(path: str, body: object) -> Any:
    """The JSON answer of a POST, for what a client's answer is compared with."""
    request = urllib.request.Request(
        f"{URL}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def metric(name: str, base: str = URL) -> float:
    """The sum of a metric over its labels."""
    lines = (line.rpartition(" ") for line in get("/metrics", base).splitlines() if not line.startswith("#"))
    return sum(float(value) for label, _, value in lines if label.partition("{")[0] == name)


def wait_until(what: str, reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Fails when it never comes true."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def wait_for_aborts(count: float, before: float) -> None:
    """Until the router has aborted `count` more requests than `before`. One that runs to its end never counts."""
    name = "sglang:num_aborted_requests_total"
    wait_until(f"{count:g} aborts after {before:g}", lambda: metric(name) == before + count)


def raises(kind: type[BaseException], function: Callable[[], Any]) -> Any:
    """The exception of that type, which `function` must raise."""
    try:
        answer = function()
    except kind as e:
        return e
    raise AssertionError(f"no {kind.__name__}, but {answer!r}")


def run_tool(*command: str, timeout_s: float = 240.0) -> str:
    """What a command-line tool wrote; fails with it unless the exit code is 0."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
    text = f"{done.stdout}\n{done.stderr}"
    print(text)
    assert done.returncode == 0, f"exit code {done.returncode}: {text[-2000:]}"
    return text
