"""Many requests at once: nodes die under them, and clients leave in crowds."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.modelzoo import IM_END_ID, random_prompt, reference_greedy, reference_greedy_batch
from tests.patience import PATIENCE_S, until
from tests.processes import Call, Fleet

pytestmark = pytest.mark.processes


STORM_NEW = 200


def prompt(number: int, length: int) -> list[int]:
    """Prompts with different numbers share no first token, so none is a prefix hit of another."""
    return [IM_END_ID + 1 + number, *random_prompt(length - 1, seed=number)]


def test_nodes_die_under_many_streams_and_the_others_go_on(tiny_model: Path, tmp_path: Path) -> None:
    """2P2D: half of the streams lose their decode node and go on; then a prefill node dies too; both come back."""
    num_new, num_compared = 1000, 100
    flags = ("--page-size", "4", "--kv-transfer", "gloo")
    with Fleet(tmp_path / "logs", tiny_model, "2P2D", flags=flags) as fleet:
        router = fleet.router
        calls = {n: router.generate(prompt(n, 40), num_new, stream=True) for n in range(8)}

        def under_way() -> set[int]:
            return {n for n, call in calls.items() if len(call.token_ids) >= 3 and not call.ended}

        until(lambda: len(under_way()) >= 6, "most streams run at once")
        streaming = under_way()
        fleet.nodes["d0"].kill()
        outputs = [call.tokens() for call in calls.values()]
        assert [len(tokens) for tokens in outputs] == [num_new] * len(calls)
        expected = reference_greedy_batch(tiny_model, [prompt(n, 40) for n in calls], num_compared)
        assert [tokens[:num_compared] for tokens in outputs] == expected
        _, metrics = router.get("/metrics")
        (moved,) = re.findall(r'num_failovers_total{cause="decode_node_lost".*} (.*)', metrics)
        assert 0 < float(moved) < len(streaming), "of those under way, d0 had some and d1 had some"
        (inexact,) = re.findall(r"num_inexact_continuations_total{.*} (.*)", metrics)
        assert 0 < float(inexact) <= float(moved), "torch computes float32, and is not exact"
        router.wait_home("p0", "p1", "d1")

        fleet.nodes["p1"].kill()  # d1 and p0 serve alone, each request once they are known to be
        until(lambda: "p1" not in router.loads(), "p1 is lost")
        again = [router.generate(prompt(20 + n, 40), 12, return_timeline=True) for n in range(4)]
        for n, call in enumerate(again):
            assert call.tokens() == reference_greedy(tiny_model, prompt(20 + n, 40), 12)
            assert call.last["meta_info"]["kv_pages_transferred"] == 10

        fleet.mend()  # restarted on their ports, they are taken up again, and used
        generated = {name: load["num_generated_tokens"] for name, load in router.loads().items()}
        again = [router.generate(prompt(30 + n, 40), 12) for n in range(4)]
        for n, call in enumerate(again):
            assert call.tokens() == reference_greedy(tiny_model, prompt(30 + n, 40), 12)
        router.wait_home()
        loads = router.loads()
        assert set(loads) == {"p0", "p1", "d0", "d1"}
        assert all(loads[name]["num_generated_tokens"] > generated[name] for name in loads)
        fleet.stop()


@pytest.fixture(scope="module")
def storm_fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Every stage takes a while: small chunks, one small staging slot, a decode pool for a few of them."""
    with Fleet(
        tmp_path_factory.mktemp("storm"),
        tiny_model,
        flags=(
            "--page-size",
            "1",
            "--chunked-prefill-size",
            "4",
            "--kv-slot-bytes",
            "4096",
            "--kv-slots",
            "1",
        ),
        decode_flags=("--max-total-tokens", "1500"),
    ) as fleet:
        yield fleet
        fleet.mend()
        fleet.stop()


@pytest.fixture(scope="module")
def storm_prompts(tiny_model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what follows them."""
    prompts = [prompt(number, 30 + 20 * (number // 2)) for number in range(8)]
    return prompts, reference_greedy_batch(tiny_model, prompts, STORM_NEW)


def test_abort_storm(
    storm_fleet: Fleet, storm_prompts: tuple[list[list[int]], list[list[int]]], tiny_model: Path
) -> None:
    """Requests called off at random times, half by /abort_request, half by hanging up, while one goes on."""
    router, rng = storm_fleet.router, random.Random("both")
    prompts, references = storm_prompts
    kept = router.generate(prompts[0], STORM_NEW, stream=True)
    aborted: list[tuple[int, Call]] = []

    def one(number: int) -> None:
        rid, which = f"storm-{number}", number % len(prompts)
        time.sleep(rng.uniform(0, 1.5))
        streams = number % 3 != 0
        call = router.generate(prompts[which], STORM_NEW, stream=streams, rid=rid)
        if streams and number % 4 == 0:
            call.wait_tokens(1)  # called off in a late stage
        elif number % 4 != 2:  # nor at once, in an early stage
            time.sleep(rng.uniform(0, 1))
        if number % 2:
            call.hang_up()
        else:
            assert router.post("/abort_request", {"rid": rid}).finish().status == 200
            aborted.append((which, call.finish()))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert kept.tokens() == references[0]
    router.wait_home()
    ends = [call.last["meta_info"]["finish_reason"]["type"] for _, call in aborted]
    for which, call in aborted:
        assert call.status == 200 and call.error is None and not call.broken, call.describe()
        assert call.token_ids == references[which][: len(call.token_ids)]
    assert ends.count("abort") >= 8, ends
    assert {len(call.token_ids) == 0 for _, call in aborted} == {True, False}, "in early and in late stages"
    after = prompt(100, 50)
    assert router.generate(after, 20).tokens() == reference_greedy(tiny_model, after, 20)
