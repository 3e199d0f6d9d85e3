"""This node as one end of its transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.config import TransferOptions
from shared.device_streams import GatherUnderWay
from shared.kvtransfer.transports.choice import Transports
from shared.protocol.messages import KVLayout, NodeRef, Outbox
from shared.timeline import Clock


class PageStore(Protocol):
    """Reads and writes whole pages; `kvcache.pools.TokenToKVPool` is one.

    Called on data threads, for pages that the transfer owns meanwhile.
    """

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        """Size of `num_pages` pages of `num_layers` layers, K and V."""
        ...

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int | GatherUnderWay:
        """Copy pages into the uint8 tensor `out`, layer-major, K before V, or begin to.

        The digest is of what was copied: the same that `scatter` returns for the same bytes and seed.
        """
        ...

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        """The inverse of `gather`; blocks until the pages are written. Returns the digest of what was written."""
        ...


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What a KVSender or a KVReceiver is made of.

    `wake` tells the scheduler that `poll` has something. It is called from any thread, under the lock of the side,
    and must only signal.
    """

    node: NodeRef
    layout: KVLayout
    pages: PageStore
    outbox: Outbox
    transports: Transports
    clock: Clock
    options: TransferOptions
    wake: Callable[[], None]
