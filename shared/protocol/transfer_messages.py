"""What two nodes say to each other about KV pages: one tagged union for each direction.

    sender   → receiver   SenderToReceiver   hello, offers, handoff
    receiver → sender     ReceiverToSender   link, ready, grants, done, leases

Entries of a link's rendezvous store, pings and cancels go both ways. A transfer has the `ReqKey` of its request.
"""

from __future__ import annotations

import msgspec

from shared.protocol.logprobs import Logprobs
from shared.protocol.messages import KVLayout, NodeRef, Record, Refused, ReqKey, Struct
from shared.timeline import Stamp


# -------------------------------------------------------------------------------------- both ways
class StoreSet(Struct, frozen=True):
    """One entry of the rendezvous store of `link`, while it is being built."""

    link: str
    name: str
    value: bytes


class LinkLost(Struct, frozen=True):
    """This end has given `link` up, or could not build it."""

    link: str
    reason: str


class CancelTransfer(Struct, frozen=True):
    """Give up the transfer of `key`; chunks already granted are still sent, flagged void."""

    key: ReqKey
    reason: str
    handed_off: bool = False
    """The sending node has sent its Handoff, which a connection that broke may have lost."""


class PeerPing(Struct, frozen=True):
    """Liveness of a pair's control connection; each side sends them, each side answers with PeerPong."""

    seq: int


class PeerPong(Struct, frozen=True):
    """Answer to PeerPing."""

    seq: int


# ----------------------------------------------------------------------------------------- sender → receiver
class Place(Record, frozen=True):
    """Where a node is. `host` is the same on nodes that can share memory, `gpu` the UUID of the GPU with its pages.

    Each is empty where there is none.
    """

    host: str = ""
    gpu: str = ""


class PeerHello(Struct, frozen=True):
    """First message of a sending node on a fresh connection; answered with LinkOpen or Refused.

    `transports` are the data paths that it offers, the best first. Its staging slots take `slot_nbytes`.
    """

    node: NodeRef
    layout: KVLayout
    transports: tuple[str, ...]
    place: Place
    slot_nbytes: int
    version: int = 8
    """The sender's PROTOCOL_VERSION; versions up to 8, which refuse every other one, did not say it."""


class Offer(Struct, frozen=True):
    """Pages [first_page, first_page + num_pages) of the sequence are computed and held for the receiver.

    They come in all layers, or only in those without windows (`KVLayout.windows`). Once window pages have come, those
    of all later pages do.
    """

    key: ReqKey
    first_page: int
    num_pages: int
    has_windows: bool = False


class PeerLeft(Struct, frozen=True):
    """The sending node closes this connection: it ends, or does not need it now. If it does again, it says hello."""


class Handoff(Struct, frozen=True):
    """The end of a transfer: with it and all pages, the receiving node can go on by itself.

    `total_pages` counts from the start of the sequence, so it includes the prefix that the receiving node had.
    `token_ids` are all tokens that the sending node knows beyond those that the receiving node has in its Work: after
    a prefill the one that was sampled and those jumped over behind it, after a move every one since its dispatch. The
    pages hold the KV of the first `kv_len` tokens, which are at least those of the Work and never all. `digest` is
    `record_digest` of the sequence. The logprobs are those of `token_ids`, if it is one token, and of the prompt, if
    `token_ids` begin at position 0: the receiving node repeats to the router what the sending node has told it.
    """

    key: ReqKey
    total_pages: int
    token_ids: tuple[int, ...]
    kv_len: int
    digest: int
    cached_tokens: int
    stamps: tuple[Stamp, ...]
    logprobs: Logprobs | None = None
    input_logprobs: Logprobs | None = None


# ----------------------------------------------------------------------------------------- receiver → sender
class LinkOpen(Struct, frozen=True):
    """Build `link` over `transport`, which the sending node offered; `node` is the receiving node.

    `secret` keys the challenge over the new link. `passed_over` are better transports, and why they are not used.
    """

    link: str
    node: NodeRef
    secret: bytes
    transport: str
    passed_over: dict[str, str] = msgspec.field(default_factory=dict)


class Ready(Struct, frozen=True):
    """The first `num_pages` pages of `key` have a place here; pages [0, prefix_pages) need not be sent.

    Of a request that moves while it runs, the receiving node knows the first `num_known` tokens.
    """

    key: ReqKey
    prefix_pages: int
    num_pages: int
    num_known: int | None = None


class GrantedChunk(Record, frozen=True):
    """These pages of these layers, which take exactly `nbytes`."""

    key: ReqKey
    first_page: int
    num_pages: int
    first_layer: int
    num_layers: int
    nbytes: int


class Grant(Struct, frozen=True):
    """Receives are posted: send these chunks as messages `seq`, `seq + 1`, ... of the link."""

    link: str
    seq: int
    chunks: tuple[GrantedChunk, ...]


class Done(Struct, frozen=True):
    """The transfer of `key` has ended on the receiving node; the sending node may let go of its pages.

    `corrupt`: its pages did not match their digests. Then only the receiving node tells the router, and the sending
    node evicts the pages that it sent.
    """

    key: ReqKey
    ok: bool
    reason: str = ""
    corrupt: bool = False


class LeaseRenew(Struct, frozen=True):
    """These transfers are alive on the receiving node; pages held for any other may be released when leases end."""

    keys: tuple[ReqKey, ...]


SenderToReceiver = (
    PeerHello | PeerLeft | Offer | Handoff | CancelTransfer | StoreSet | LinkLost | PeerPing | PeerPong
)
ReceiverToSender = (
    LinkOpen
    | Refused
    | Ready
    | Grant
    | Done
    | LeaseRenew
    | CancelTransfer
    | StoreSet
    | LinkLost
    | PeerPing
    | PeerPong
)
