"""Traffic without a trace: `--rate 4 --prompt 900:2000 --output 150:400`.

900:2000 is a median and a 99th percentile, the two figures that a metrics page shows, of a log-normal distribution.
Lengths of real traffic are skewed like that: prompts of Azure's conversations have a median of 1035 and a 99th
percentile of 4122 tokens. 900 is that length alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

from planner.figures import arrival_seconds
from planner.traffic.trace import BLOCK_TOKENS, MAX_TOKENS, SimRequest, Trace
from shared.errors import ConfigError

_Z99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of prompts or of answers, in tokens: log-normal."""

    median: int
    p99: int

    @classmethod
    def parse(cls, flag: str, text: str) -> Lengths:
        """MEDIAN:P99 or LENGTH. Raises ConfigError that names `flag`."""
        first, found, second = text.partition(":")
        parts = (first, second if found else first)
        numbers = [int(part) if len(part) < 9 and part.isdecimal() else 0 for part in parts]
        if not 1 <= numbers[0] <= numbers[1] <= MAX_TOKENS:
            raise ConfigError(
                f"{flag} {text}: it is MEDIAN:P99 or one length, from 1 to {MAX_TOKENS} tokens, the smaller first"
            )
        return cls(median=numbers[0], p99=numbers[1])

    def draw(self, rng: random.Random) -> int:
        """One length."""
        sigma = math.log(self.p99 / self.median) / _Z99
        return min(MAX_TOKENS, max(1, round(self.median * math.exp(sigma * rng.gauss(0.0, 1.0)))))


def drawn_trace(*, rate: float, prompt: Lengths, output: Lengths, num_requests: int, seed: int = 0) -> Trace:
    """`num_requests` that arrive at random (Poisson), `rate` a second, and share no prefix.

    With the same seed, another rate gives the same requests closer together or further apart.
    """
    gaps, lengths = random.Random(seed), random.Random(seed + 1)
    times = list(accumulate((gaps.expovariate(1.0) for _ in range(num_requests - 1)), initial=0.0))
    # A few hundred gaps are off by some percent together, and a plan is to be for the rate that was asked for.
    scale = num_requests / rate / arrival_seconds(times) if num_requests > 1 else 0.0
    requests, num_blocks = [], 0
    for at_s in times:
        input_len = prompt.draw(lengths)
        own = range(num_blocks, num_blocks + -(-input_len // BLOCK_TOKENS))
        num_blocks = own.stop
        requests.append(SimRequest(scale * at_s, input_len, output.draw(lengths), tuple(own), BLOCK_TOKENS))
    remark = "The requests are drawn and share no prefix, so no prompt finds any of its tokens in a cache."
    return Trace(requests=requests, remarks=(remark,))
