"""Input ids from the FutureMap, beside its torch operations."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.triton import resolve as kernel

pytestmark = pytest.mark.usefixtures("on_device")

PADDING_ROW = 9


@pytest.mark.parametrize("block", [4, kernel.BLOCK])
@pytest.mark.parametrize(("num_tokens", "num_writes"), [(1, 0), (1, 1), (11, 3), (9, 9)])
def test_writes_enter_before_the_map_is_read(num_tokens: int, num_writes: int, block: int) -> None:
    last_tokens = 100 + torch.arange(PADDING_ROW + 1)
    rows = torch.arange(num_writes)
    rows[1::3] = PADDING_ROW
    tokens = torch.where(rows == PADDING_ROW, 0, 200 + rows)
    ids = torch.arange(num_tokens)
    ids[::2] = -1 - ids[::2] % PADDING_ROW
    expected_map = last_tokens.clone()
    expected_map[rows] = tokens
    expected = torch.where(ids < 0, expected_map[(-1 - ids).clamp(min=0)], ids)
    assert torch.equal(kernel.resolve(ids, rows, tokens, last_tokens, block), expected)
    assert torch.equal(last_tokens, expected_map)
