"""Streams that run while something happens to the fleet."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Collection, Sequence
from types import TracebackType

from tests.bench.servers import TokenStream, new_client, stream
from tests.patience import eventually

_numbers = itertools.count()


class RunningStreams:
    """Greedy streams to one router, by request id. What still runs when the block ends is called off."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = new_client()
        self._tasks: list[asyncio.Task[TokenStream]] = []
        self.prompts: dict[str, Sequence[int]] = {}
        self.seen: dict[str, TokenStream] = {}

    async def __aenter__(self) -> RunningStreams:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    def start(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Start a stream of each prompt."""
        for prompt in prompts:
            rid = f"stream-{next(_numbers)}"
            seen = self.seen[rid] = TokenStream(0.0)
            self.prompts[rid] = prompt
            running = stream(self._client, self._url, prompt, max_new_tokens, seen, rid)
            self._tasks.append(asyncio.create_task(running))

    async def have_tokens(
        self, count: int, *, since: float = 0.0, rids: Collection[str] | None = None
    ) -> None:
        """Until each of these streams has had so many events since a time."""

        def have() -> bool:
            self.assert_running()
            counts = (sum(at > since for at in self.seen[rid].times) for rid in rids or self.seen)
            return all(number >= count for number in counts)

        await eventually(have, f"{count} tokens of each stream")

    def assert_running(self) -> None:
        """No stream has ended."""
        for task in self._tasks:
            assert not task.done(), f"a stream has ended: {task.exception() or task.result().times[-1]}"

    async def end(self) -> dict[str, list[int]]:
        """The output ids of each, when all have ended."""
        await asyncio.gather(*self._tasks)
        return {rid: seen.output_ids for rid, seen in self.seen.items()}

    async def ttfts_s(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Send these prompts at once; seconds until the first token of each."""
        done = await asyncio.gather(*(stream(self._client, self._url, ids, 2) for ids in prompts))
        return [one.ttft_s for one in done]

    def longest_gap_s(self, rid: str, begin: float, end: float) -> float:
        """The longest wait for an event of a stream that lies, in part at least, between two times."""
        return max(b - a for a, b in self.seen[rid].gaps() if b > begin and a < end)

    def median_gap_s(self, rid: str, begin: float, end: float) -> float:
        """Of the waits for events that lie, in part at least, between two times."""
        return statistics.median(b - a for a, b in self.seen[rid].gaps() if b > begin and a < end)
