"""What only a GPU can answer, and what rests on the answer."""

from __future__ import annotations

import itertools
from multiprocessing import get_context
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from shared.kernels.triton.linear import ExactLinear
from tests.gpu.rows import Row, Verdict, figure
from tests.gpu.steps import Place, Report

TILES = (16, 32, 64, 128)
WARPS = (4, 8)
PRODUCT_DEPTH = 4096


def run(place: Place, report: Report) -> None:
    """A row for each answer."""
    for what, query_tokens, kv_tokens, masked in (
        ("extend without a prefix", 2048, 2048, False),
        ("extend over a cached prefix", 512, 2048, True),
        ("decode step of a batch", 1, 2048, True),
    ):
        backend = sdpa_backend(place.device, query_tokens, kv_tokens, masked=masked)
        report(figure(f"SDPA, {what}", backend, note="which torch takes for --attention-backend torch"))
    if place.is_dry:
        for what in ("bits of mma and wgmma tiles", "bits of --exact's products", "IPC of GPU memory"):
            report(Row(what=what, verdict=Verdict.SKIP, note="needs a GPU"))
        return
    report(
        figure("bits of mma and wgmma tiles", tile_bits(), note="of one row's product, over tiles x warps")
    )
    same = ExactLinear.of(torch.device(place.device), torch.bfloat16).same_bits(
        (PRODUCT_DEPTH,), torch.bfloat16, torch.device(place.device)
    )
    report(figure("bits of --exact's products", "same" if same else "differ", note="over its tiles"))
    report(figure("IPC of GPU memory", ipc(), note="a process reads what another one has allocated"))


def sdpa_backend(device: str, query_tokens: int, kv_tokens: int, *, masked: bool) -> str:
    """The backend that torch would choose for the attention of 32 heads over 8 KV heads."""
    q = torch.empty(1, 32, query_tokens, 128, dtype=torch.bfloat16, device=device)
    kv = torch.empty(1, 8, kv_tokens, 128, dtype=torch.bfloat16, device=device)
    mask = torch.ones(query_tokens, kv_tokens, dtype=torch.bool, device=device) if masked else None
    chosen = torch._fused_sdp_choice(q, kv, kv, mask, 0.0, not masked, enable_gqa=True)
    return SDPBackend(chosen).name.lower()


def tile_bits() -> str:
    """Which tiles and warps give the same bits for the same row, in groups."""
    from tests.gpu.tile_kernel import tile_product

    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
        for size in ((max(TILES), PRODUCT_DEPTH), (PRODUCT_DEPTH, 128))
    )
    groups: list[tuple[torch.Tensor, list[str]]] = []
    for tile, warps in itertools.product(TILES, WARPS):
        rows = tile_product(a[:tile], b, num_warps=warps)[: min(TILES)]
        for of_group, members in groups:
            if torch.equal(of_group, rows):
                members.append(f"{tile}x{warps}")
                break
        else:
            groups.append((rows, [f"{tile}x{warps}"]))
    return "all equal" if len(groups) == 1 else " | ".join(" ".join(members) for _, members in groups)


def ipc() -> str:
    """Whether another process can map memory of this one's GPU, and sees what is written to it."""
    context = get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_read_shared, args=(there,), daemon=True)
    child.start()
    shared = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    here.send(shared)
    answer = here.recv() if here.poll(60) else "no answer within 60 s"
    child.join(10)
    return str(answer)


def _read_shared(pipe: Any) -> None:
    try:
        shared = pipe.recv()
        pipe.send("works" if bool((shared == 7).all()) else "maps other bytes")
    except Exception as error:  # whatever it is, it is the answer
        pipe.send(f"fails: {type(error).__name__}: {error}")
