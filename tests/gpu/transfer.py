"""How fast do pages move between two processes on one GPU, against what carries them?

The pages are those of an 8B, scattered over both pools; the path is that of a node (offers, grants, gather, send,
scatter, digests). `of the limit` is the share of what the copies alone allow:

    cuda-ipc   two copies within the GPU, into a slot and out of it: half the rate at which one copy moves bytes
    shm        one copy to pinned memory and one back, which run beside each other
    gloo       the same, and the network stack of the host in between, which has no limit of its own here
"""

from __future__ import annotations

from shared.config import TransferOptions
from shared.errors import ConfigError
from shared.protocol.messages import KVLayout
from tests.bench.transfer import DecodeSide, Setting, behave_like_a_node
from tests.gpu.limits import measured
from tests.gpu.rows import Row, Target, Verdict, figure
from tests.gpu.steps import Place, Report

BACKENDS = ("cuda-ipc", "shm", "gloo")
LAYOUT = KVLayout("bench", "bfloat16", 16, 32, 8, 128)
DRY_LAYOUT = KVLayout("bench", "bfloat16", 16, 2, 2, 64)
POOL_PAGES, PAGES = 4096, (32, 512, 2048)
"""Pages of 2 MiB: 512, 8192 and 32768 tokens."""
DRY_POOL_PAGES, DRY_PAGES = 64, (16,)
ROUNDS = 5
IPC_TARGET = Target(at_least=0.6)


def run(place: Place, report: Report) -> None:
    """A row for each transport and size."""
    behave_like_a_node()
    limits = measured(place)
    through_host = min(limits["to_host_gb_s"], limits["to_device_gb_s"])
    for backend in BACKENDS:
        limit = limits["copy_gb_s"] / 4 if backend == "cuda-ipc" else through_host
        if place.is_dry and backend == "cuda-ipc":
            report(Row(what=backend, verdict=Verdict.SKIP, note="needs a GPU; its fake runs in make test"))
            continue
        try:
            measure(place, report, backend, limit)
        except ConfigError as error:
            report(Row(what=backend, verdict=Verdict.FAIL, note=str(error)))


def measure(place: Place, report: Report, backend: str, limit_gb_s: float) -> None:
    """Transfers of every size over one link."""
    layout, pool_pages, sizes = (
        (DRY_LAYOUT, DRY_POOL_PAGES, DRY_PAGES) if place.is_dry else (LAYOUT, POOL_PAGES, PAGES)
    )
    page_nbytes = 2 * layout.num_layers * layout.num_kv_heads * layout.page_size * layout.head_dim * 2
    side = DecodeSide(
        Setting(
            options=TransferOptions(backend=backend),
            layout=layout,
            num_pages=pool_pages,
            device=place.device,
        )
    )
    for num_pages in sizes:
        side.batch_s(num_pages)
        nbytes = num_pages * page_nbytes
        gb_s = sorted(nbytes / side.batch_s(num_pages) / 1e9 for _ in range(ROUNDS))[ROUNDS // 2]
        has_target = backend == "cuda-ipc" and num_pages == max(sizes) and not place.is_dry
        report(
            figure(
                f"{backend}: {nbytes / 2**20:.3g} MiB",
                gb_s / limit_gb_s,
                target=IPC_TARGET if has_target else None,
                note=f"of the limit of {limit_gb_s:.3g} GB/s; {gb_s:.3g} GB/s",
                gb_s=gb_s,
            )
        )
    side.close()
