"""One event of the live feed as text."""

from __future__ import annotations

import msgspec
from rich.console import Console

from router.api.live_feed import FleetSample, LiveEvent, NodeNow, RouterNow, Sample
from router.terminal.top import live_view

FLEET = FleetSample(
    num_nodes=1,
    num_running_reqs=0,
    num_queue_reqs=0,
    num_transferring_reqs=0,
    tokens_per_s=0,
    kv_bytes_per_s=2_500_000,
    num_pages=0,
    num_free_pages=0,
    num_cached_pages=0,
    num_held_pages=0,
)
SAMPLE = Sample(
    time=0,
    num_running_reqs=3,
    num_queue_reqs=7,
    tokens_per_s=1234.5,
    reqs_per_s=1,
    rejected_per_s=0,
    ttft_s=(0.0123, 0.25, 3.5),
    itl_s=None,
    prefill=FLEET,
    decode=FLEET,
)
ROUTER = RouterNow(
    worker="1",
    status="degraded",
    reason="prefill-0 is lost",
    model="tiny\x1b[2J",
    version="0",
    has_chat_template=True,
    context_length=256,
    uptime_s=3725,
    percentile_window_s=10,
)
NODES = [
    NodeNow(node_id="prefill-0", role="prefill", address="a", state="gone", reason="connection closed"),
    NodeNow(node_id="prefill-1", role="prefill", address="", state="loading", reason="weights", loaded=0.5),
    NodeNow(
        node_id="decode-0",
        role="decode",
        address="b",
        state="live",
        num_running_reqs=3,
        num_pages=160,
        num_held_pages=80,
        num_cached_pages=40,
        num_free_pages=40,
        tokens_per_s=1234.5,
        kv_bytes_per_s=2_500_000,
    ),
]


def screen(
    *samples: Sample,
    nodes: list[NodeNow] = NODES,
    trouble: str = "",
    width: int = 140,
    verdict: str = "",
    advice: str = "",
) -> dict[str, str]:
    """Its lines by their first words."""
    console = Console(width=width, highlight=False, color_system=None)
    event = LiveEvent(router=ROUTER, nodes=nodes, samples=list(samples), verdict=verdict, advice=advice)
    with console.capture() as capture:
        console.print(live_view(event, "host:8000", trouble))
    return {line.split("  ")[0]: line for line in capture.get().splitlines() if line.strip()}


def test_a_busy_fleet() -> None:
    lines = screen(SAMPLE)
    title = lines["Baton tiny�[2J"]
    assert "router 1 " in title and "degraded" in title and "up 1 h 2 min" in title, (
        "and what controls terminals is shown as �"
    )
    assert "prefill-0 is lost" in lines
    assert "3" in lines["streaming"] and "p50" in lines["streaming"]
    assert lines["waiting"].split() == [
        *["waiting", "7", "first", "token", "12.3", "ms", "250", "ms", "3.50", "s"]
    ]
    assert lines["tokens/s"].split() == ["tokens/s", "1,234", "inter-token", "–", "–", "–"]
    assert lines["KV transfer"].split() == ["KV", "transfer", "2", "MB/s", "refused/s", "0"]
    assert "gone" in lines["prefill-0"] and "loading 50%" in lines["prefill-1"]
    assert "80/40/40" in lines["decode-0"]
    assert "1,234 out" in lines["decode-0"]


def test_a_narrow_terminal_still_has_names_and_states() -> None:
    lines = screen(SAMPLE, width=60)
    text = "\n".join(lines.values())
    for words in ("prefill-0", "prefill-1", "decode-0", "gone", "loading 50%", "live"):
        assert words in text, text


def test_the_verdict_on_the_fleets() -> None:
    assert "prefill is the bottleneck: 84 % busy" in screen(
        SAMPLE, verdict="prefill is the bottleneck: 84 % busy"
    )
    assert "no bottleneck" in screen(SAMPLE, verdict="no bottleneck")


def test_the_advice_of_the_planner() -> None:
    told = screen(SAMPLE, advice="3 prefill nodes would meet the SLOs\x1b[2J (planned at 12:00 UTC)")
    (line,) = [line for line in told.values() if line.startswith("plan: ")]
    assert line.startswith("plan: 3 prefill nodes would meet") and line.rstrip().endswith(
        "(planned at 12:00 UTC)"
    )
    assert "\x1b" not in line
    assert not [line for line in screen(SAMPLE).values() if line.startswith("plan:")]


def test_nothing_yet() -> None:
    lines = screen(nodes=[])
    assert "no nodes yet" in lines
    assert "streaming" not in lines


def test_what_is_old_says_so() -> None:
    assert any("trying again" in line for line in screen(SAMPLE, trouble="the router has stopped").values())


def test_links_are_told_in_a_line_of_their_own() -> None:
    words = ["1 gloo, 2 GB/s, 0.3 ms; not shm: \x1b[2J" + 200 * "x"]
    for width in (80, 140):
        lines = screen(SAMPLE, nodes=[msgspec.structs.replace(NODES[2], links_words=words)], width=width)
        (line,) = [line for line in lines.values() if "gloo" in line]
        assert line.startswith("decode-0 links: 1 gloo, 2 GB/s, 0.3 ms; not shm: ")
        assert line.endswith("…") and "\x1b" not in line
