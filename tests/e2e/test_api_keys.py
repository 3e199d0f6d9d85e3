"""What one API key can find out of another's prompts: a record with a PIN, and guesses that the cache may tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.golden.references import Zoo
from tests.modelzoo import random_prompt
from tests.patience import PATIENCE_S
from tests.processes import Fleet, Router

pytestmark = pytest.mark.processes

PAGE = 16
TEMPLATE, REST = random_prompt(2 * PAGE + 4, seed=1), random_prompt(2 * PAGE, seed=2)
"""The record before and behind the PIN, which are no secret."""
PINS = [(7, 3, 9), *((7, 3, digit) for digit in range(1, 9)), (1, 2, 3), (9, 3, 7)]
"""The right one is the first."""
KEYS = ("--api-key", "key-of-a", "key-of-b")


def record(pin: Sequence[int]) -> list[int]:
    """Two pages before the one that has the PIN, and one behind."""
    return [*TEMPLATE, *pin, *REST]


def num_cached(router: Router, key: str, ids: Sequence[int], **fields: object) -> int:
    body = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 1}, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{router.url}/generate", json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["meta_info"]["cached_tokens"]
    return cached


def guesses(router: Router, key: str) -> list[int]:
    """What each guess of the PIN finds in the cache, that of the right one first. The template is there before."""
    num_cached(router, key, TEMPLATE)
    return [num_cached(router, key, record(pin)[: 3 * PAGE + 1]) for pin in PINS]


def test_guesses_find_nothing_of_another_keys_prompts(zoo: Zoo, tmp_path: Path) -> None:
    flags = ("--page-size", str(PAGE), "--max-total-tokens", "4096")
    router_flags = (*KEYS, "--local-prefill-tokens", "0")
    with Fleet(tmp_path, zoo.folder("llama"), flags=flags, router_flags=router_flags) as fleet:
        router = fleet.router
        assert num_cached(router, "key-of-a", record(PINS[0])) == 0
        assert guesses(router, "key-of-b") == [2 * PAGE] * len(PINS), "the right PIN is like any other"
        assert num_cached(router, "key-of-b", record(PINS[0]), extra_key="guessed") == 0

        # The owner of the record finds it, by a guess too, here and at another router of the fleet.
        right, *wrong = guesses(router, "key-of-a")
        assert wrong == [2 * PAGE] * len(wrong) and right == 3 * PAGE
        assert num_cached(router, "key-of-a", record(PINS[0])) >= 4 * PAGE
        joins = [part for node in fleet.nodes.values() for part in (f"--{node.role}", node.address)]
        with Router(tmp_path, *joins, "--api-key", "key-of-a", name="other") as other:
            other.wait_ready()
            assert num_cached(other, "key-of-a", record(PINS[0])) >= 4 * PAGE
            assert num_cached(other, "key-of-a", record(PINS[0]), extra_key="another") == 0
            assert other.stop() == 0
        logs = "".join(process.log for process in fleet.processes)
        assert not any(key in logs for key in KEYS[1:])
        fleet.stop()
