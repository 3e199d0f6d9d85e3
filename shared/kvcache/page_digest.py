"""The digest of a chunk of KV pages: what a sender has read, and what a receiver has written, must have the same.

A chunk is a number of slices of equal length, each one page of K or of V of one layer. A slice is cut into lines of 8
words of 64 bits, the last one filled up with zeros. For word w of a line, with keys that depend on the line and on w,

    lane[w] += int32(low(x[w]) + low_key) * int32(high(x[w]) + high_key) + x[w ^ 1]        (NH, and a plain sum)
    digest   = sum over slices s and w of mix(lane[w] + seed + (8 s + w + 1) * GOLDEN)

all modulo 2^64 (the halves and their keys modulo 2^32). So a slice cannot stand in another's place, nor a chunk in
the place of one with another seed. One word that differs always changes a lane, by a plain sum. Other differences
leave all lanes as they are with a chance of about 2^-32, and other lanes have the same digest with a chance of 2^-64.
It is no defence against forged pages.

Sums can be taken in any order: a native gather or scatter takes them while it copies, and a GPU in parallel.
NH: Black et al., "UMAC: Fast and Secure Message Authentication" (CRYPTO 1999); mix: splitmix64.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_LINE_NBYTES = 64
_LANES = 8
_WORD = 1 << 64
_BLOCK_NBYTES = 1 << 19
"""So much at a time on a CPU: what is computed of it stays in a cache, and in memory that torch has already."""


def chunk_digest(chunk: torch.Tensor, slice_nbytes: int, seed: int) -> int:
    """The digest of `chunk`, contiguous uint8 of any shape, on any device. It is the slow twin of `page_digest.h`."""
    x_SN = chunk.view(chunk.numel() // slice_nbytes, slice_nbytes)
    if slice_nbytes % _LINE_NBYTES:
        x_SN = torch.nn.functional.pad(x_SN, (0, -slice_nbytes % _LINE_NBYTES))
    block = max(1, _BLOCK_NBYTES // slice_nbytes if x_SN.device.type == "cpu" else len(x_SN))
    digest = 0
    for first in range(0, len(x_SN), block):
        digest += _sum_of_slices(x_SN[first : first + block], first, seed)
    return digest % _WORD


def _sum_of_slices(x_SN: torch.Tensor, first: int, seed: int) -> int:
    """What slices `first`, `first + 1`, ... of a chunk add to its digest."""
    num_slices, num_lines = len(x_SN), x_SN.shape[1] // _LINE_NBYTES
    keyed_SLWH = x_SN.view(torch.int32).view(num_slices, num_lines, _LANES, 2) + _keys(num_lines, x_SN.device)
    products_SLW = keyed_SLWH[..., 0].to(torch.int64) * keyed_SLWH[..., 1]
    sums_SW = x_SN.view(torch.int64).view(num_slices, num_lines, _LANES).sum(1)
    lanes_SW = products_SLW.sum(1) + sums_SW.view(num_slices, _LANES // 2, 2).flip(2).view(num_slices, _LANES)
    places = torch.arange(first * _LANES + 1, (first + num_slices) * _LANES + 1, device=x_SN.device)
    mixed = _mix(lanes_SW + _signed(seed) + places.view(num_slices, _LANES) * _signed(_GOLDEN))
    return int(mixed.sum())


@lru_cache(maxsize=8)
def _keys(num_lines: int, device: torch.device) -> torch.Tensor:
    """The keys of both halves of each word, int32 [L, 8, 2]."""
    random = _mix(torch.arange(1, 2 * _LANES + 1) * _signed(_GOLDEN))
    steps = random.view(torch.int32)[1::2] | 1  # little-endian: the higher half
    lines = torch.arange(num_lines, dtype=torch.int32)
    return (random.to(torch.int32) + lines[:, None] * steps).view(num_lines, _LANES, 2).to(device)


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 of the same bits."""
    return word - _WORD if word >> 63 else word
