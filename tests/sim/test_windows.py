"""Window pages through the split service: their edges, what is given up and when, and faults that must not pass.

One layer of two has a window of 9 tokens, and a page has 4. Pages of both hold token ids, and each forward compares
what a new token sees through its window (`TokenStream`), so a wrong window page fails the request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from shared.errors import LinkError
from shared.kvcache.audit import LeakError, audit
from shared.kvcache.ledger import KVLedger, ReqKV
from shared.kvtransfer.staging import ChunkPlan, Envelope
from shared.protocol.messages import KVLayout, ReqKey
from tests.cluster import Cluster
from tests.prop.stepping import Stepping, new_req
from tests.sim.test_moves import both_overlaps, config, params, prompt, wanted
from tests.token_engine import token_engine

WINDOW, PAGE = 9, 4
windowed = partial(token_engine, window=WINDOW)


def served(
    cluster: Cluster, ids: Sequence[int], num_new: int = 24, node: str = "d0", seen: int = 0
) -> ReqKey:
    """A request, or one that goes on behind its first `seen` tokens, has the reference's output."""
    expected = wanted(list(ids), num_new)
    name = f"r{len(cluster.router.answers)}"
    key = cluster.router.submit(name, ids, params(num_new), "p0", node, output_ids=expected[:seen])
    cluster.run(lambda: cluster.router.answers[key].ended, check=True)
    assert cluster.tokens(key) == expected
    return key


@both_overlaps
def test_edges(overlap: bool) -> None:
    """Prompts about the window's length, cold, then over prefixes that end inside a window, then after a failover."""
    with Cluster(1, 2, windowed, config(overlap=overlap)) as cluster:
        for length in (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 40):
            ids = prompt(length, length)
            served(cluster, ids)
            served(cluster, [*ids, *prompt(length + 1, 7)])
            served(cluster, [*ids[:-2], *prompt(length + 2, 5)], node="d1")
            served(cluster, ids, node="d1", seen=11)
        cluster.assert_idle()


def test_a_running_request_keeps_its_window_alone() -> None:
    driver = Stepping(window=WINDOW, page_size=PAGE)
    driver.add(new_req("r", prompt(1, 50), 60))
    while len(driver.live["r"].ids) < 90:
        driver.step()
    kv = driver.live["r"].kv
    assert kv is not None and kv.num_pages == 23
    assert driver.ledger.count_windows().held <= WINDOW // PAGE + 2
    driver.run()


@pytest.mark.parametrize("window", [WINDOW, WINDOW + 2])
def test_a_hit_ends_where_the_window_is_whole(window: int) -> None:
    """What was generated has window pages at its end alone, so a prefix of it is found up to the prompt."""
    driver = Stepping(window=window, page_size=PAGE)
    first, ledger = new_req("a", prompt(1, 20), 60), driver.ledger
    driver.add(first)
    driver.run()
    ids = driver.done["a"].ids
    assert ledger.peek_prefix(ids, "").num_pages == 19, "the end of the conversation"
    for num_new in range(50, 58):
        driver.add(new_req(f"a{num_new}", prompt(num_new, 20), num_new))
        driver.run()
        whole = driver.done[f"a{num_new}"].ids
        assert ledger.peek_prefix(whole, "").num_pages == (len(whole) - 1) // PAGE, (
            "wherever in a page it ends"
        )
    assert ledger.peek_prefix(ids[:50], "").num_pages == 5, "the prompt"
    assert ledger.match_prefix(ids[:50], "").pages == ledger.radix_cache.pages_of(
        ledger.peek_prefix(ids[:50], "")
    )
    driver.add(new_req("b", ids[:50], 20))
    driver.run()
    assert ledger.peek_prefix(ids[:50], "").num_pages == 12, "what was computed again has window pages again"


def test_a_retracted_request_longer_than_the_window_pool_goes_on() -> None:
    options = {"retract_policy": "host", "retract_every": 70, "disable_radix_cache": True}
    driver = Stepping(window=WINDOW, page_size=PAGE, window_tokens=80, host_tokens=1024, **options)  # type: ignore[arg-type]
    for rid, seed in (("r", 1), ("s", 2)):
        driver.add(new_req(rid, prompt(seed, 30), 100))
    driver.run()
    assert any(req.num_retractions for req in driver.done.values()) and driver.num_copies_back


def test_window_pages_are_evicted_alone() -> None:
    """Prompts that share nothing: the pool of window pages is small, and pages of the other pool all stay."""
    driver = Stepping(window=WINDOW, page_size=PAGE, num_tokens=640, window_tokens=80)
    for i in range(8):
        driver.add(new_req(f"r{i}", prompt(i, 60), 4))
        driver.run()
    count = driver.ledger.count_windows()
    assert driver.ledger.count().evictable == 8 * 15 and count.evictable <= count.total == 20


@both_overlaps
@pytest.mark.parametrize("seed", range(3))
def test_random_moves_and_hits(seed: int, overlap: bool) -> None:
    rng = random.Random(seed)
    make = partial(token_engine, window=rng.choice([1, 6, WINDOW, 30]), window_tokens=240)
    shape = config(tokens=320, overlap=overlap, retract_every=rng.choice([0, 7]))
    with Cluster(1, 2, make, shape, seed=seed) as cluster:
        router, ids, at = cluster.router, {}, {}
        for i in range(8):
            its = [*prompt(rng.randrange(2), rng.choice([8, 16])), *prompt(i, rng.randrange(1, 60))]
            key = router.submit(f"r{i}", its, params(40), "p0", f"d{i % 2}")
            ids[key], at[key] = its, (key, i % 2)
        while not all(router.answers[key].ended for key in ids):
            cluster.step(check=True)
            key = rng.choice(list(ids))
            current, node = at[key]
            moves = [move for move in router.moves.values() if move.key == current and not move.failures]
            if moves and moves[0].arrived:
                at[key] = moves[0].to_key, 1 - node
            elif router.answers[key].token_ids and not router.answers[key].ended and not moves:
                router.move(current, f"d{node}", f"d{1 - node}")
        assert any(move.arrived for move in router.moves.values())
        for key, its in ids.items():
            assert cluster.tokens(key) == wanted(its, 40)
        cluster.run_all(check=True)


# ------------------------------------------------------------------------------------------ planted faults
def run_alone(**options: object) -> Stepping:
    driver = Stepping(window=WINDOW, page_size=PAGE, **options)  # type: ignore[arg-type]
    driver.add(new_req("r", prompt(1, 30), 30), new_req("s", prompt(2, 30), 30))
    driver.run()
    return driver


def test_a_window_page_that_is_freed_one_step_early_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """--debug-checks see the hole before the forward is launched."""
    slide = KVLedger.slide

    def early(ledger: KVLedger, kv: ReqKV, num_tokens: int | None = None) -> None:
        slide(ledger, kv, kv.kv_committed_len + 1 if num_tokens is None else num_tokens)

    run_alone(overlap=False)
    monkeypatch.setattr(KVLedger, "slide", early)
    with pytest.raises(AssertionError, match="through its window"):
        run_alone(overlap=False)


def test_no_chunk_has_layers_of_both_groups_and_each_names_its_own() -> None:
    """Of one page, a chunk of one group is as long as that of the other. Taken for it, it is not the one granted."""
    layout = KVLayout("", "float32", PAGE, 6, 1, 16, windows=(0, 8, 8, 0, 8, 4))
    full, window = ChunkPlan.of_groups(layout, unit_nbytes=100, slot_nbytes=250)
    chunks = [chunk for plan in (full, window) for chunk in plan.cut(3, 1)]
    assert [(chunk.first_layer, chunk.num_layers) for chunk in chunks] == [(0, 2), (2, 2), (4, 2)]
    key = ReqKey("router", "r")
    sent = Envelope(key, chunks[0], 0).seal(17)
    assert Envelope(key, chunks[0], 0).open(sent) == 17
    with pytest.raises(LinkError, match="is not the chunk that was granted"):
        Envelope(key, chunks[1], 0).open(sent)


def test_the_audit_misses_no_window_page() -> None:
    driver = run_alone()
    windows = driver.ledger.windows
    assert windows is not None
    lost, kept = [page for page in driver.ledger.radix_cache.pages() if windows.of_page[page]][:2]
    window_page = windows.of_page[lost]
    windows.of_page[lost] = 0
    with pytest.raises(LeakError, match=rf"with none \[{window_page}\]"):
        audit(driver.ledger)
    windows.of_page[lost] = windows.of_page[kept]
    with pytest.raises(LeakError, match=rf"two owners \[{windows.of_page[kept]}\]"):
        audit(driver.ledger)
