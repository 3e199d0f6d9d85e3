"""Cases that cover their factors pairwise: every two values of any two factors meet in some case."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product


def pairwise(factors: Mapping[str, tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Greedily the case that covers most pairs not covered yet; the order of `product` breaks ties."""
    candidates = [(values, _pairs(values)) for values in product(*factors.values())]
    open_pairs = set().union(*(covered for _, covered in candidates))
    cases: list[tuple[object, ...]] = []
    while open_pairs:
        values, covered = max(candidates, key=lambda candidate: len(candidate[1] & open_pairs))
        open_pairs -= covered
        cases.append(values)
    return cases


def _pairs(values: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
    return {(i, values[i], j, values[j]) for i, j in combinations(range(len(values)), 2)}
