"""What routers and nodes say to each other: one tagged union for each link and direction.

    router → node                     RouterToNode   dispatch, cancel, liveness
    node   → router                   NodeToRouter   tokens, failures, load
    node   → router's control port    Announcement   a node loads, joins, or fails to load

What nodes say to each other is in `transfer_messages`. A request is named by its `ReqKey` on every link. Messages of
three processes arrive in any order: a process keeps those whose key it does not know yet, and drops those whose key
has ended.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Protocol

import msgspec

from shared.protocol.logprobs import Logprobs
from shared.protocol.sampling_params import SamplingParams
from shared.timeline import Role as Role
from shared.timeline import Stamp as Stamp

PROTOCOL_VERSION = 9
"""Raised by every release that changes a message. A process works with those of the version before and after its own,
so a fleet is upgraded one process after the other. Therefore a field is only ever added at the end of a message, with
a default: decoders fill in a tail that is missing, and skip one that they do not know. A message of a new type is
sent only where the hello had a version that knows it. Versions up to 8 refuse every other one."""

FRAME_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a frame may raise: no such message, a string that is not UTF-8, arrays nested without end."""


MAX_RELAYED_CHARS = 2048
"""Most characters of a string in a Relay."""


def other_version(sender: str, version: int) -> str:
    """Why the hello of a `sender` is refused; empty if their version can be spoken here."""
    if abs(version - PROTOCOL_VERSION) <= 1:
        return ""
    return (
        f"protocol: the {sender} speaks version {version or 1}, and this end version {PROTOCOL_VERSION}, which works "
        f"with {PROTOCOL_VERSION - 1} to {PROTOCOL_VERSION + 1}; upgrade release by release"
    )


class Struct(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages: a tagged array on the wire. A message is a tree, so the collector of cycles skips it."""

    since_version: ClassVar[int] = 0
    """The first PROTOCOL_VERSION that knows it. Set for the types that the version before this one does not know."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the parts of messages: an untagged array on the wire."""


class Outbox(Protocol):
    """Sends control messages to named peers. Real: `channel.ControlThread`; in tests: `fake_network.FakeNetwork`.

    `send` never blocks and may be called from any thread. Messages to one peer arrive in order or, when the peer is
    gone, not at all: a sender that needs an answer keeps a deadline.
    """

    def send(self, to: str, message: Struct) -> None:
        """Queue `message` for the peer `to` (a node id on a pair, a router incarnation towards a router)."""
        ...


class ReqKey(Record, frozen=True):
    """Names one attempt at one sequence, on all links. `router` is the router's incarnation."""

    router: str
    rid: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.router}/{self.rid}/{self.attempt}"

    @property
    def fields(self) -> dict[str, Any]:
        """Its parts, as every log event about the attempt has them."""
        return {"req": self.rid, "attempt": self.attempt, "router": self.router}


class Work(Record, frozen=True):
    """What is asked of the nodes that work on one sequence: the same for all of them, and for every attempt.

    `output_ids` are the tokens already forwarded to the client; sampling starts at position len(output_ids).
    Sequences with different `extra_key` share no cached prefix. Higher `priority` is served first, and those with
    one `routing_key` are grouped, on nodes whose flags ask for it. `rid` is the client's name of the
    request, for logs.
    """

    input_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...] = ()
    extra_key: str = ""
    priority: int = 0
    routing_key: str = ""
    rid: str = ""


class NodeRef(Record, frozen=True):
    """A node of one incarnation, and where its control socket can be dialled (`tcp://host:port`)."""

    node_id: str
    incarnation: str
    address: str


SCALE_NBYTES = 4
"""Of the float32 scale of a row of codes of 8 bits."""
_CODES = ("int8", "float8_e4m3fn")


def kv_row_nbytes(head_dim: int, dtype: str) -> int:
    """Bytes of the K or the V of a token and a head, in pages of `dtype`."""
    if dtype in _CODES:
        return head_dim + SCALE_NBYTES
    return head_dim * (4 if dtype == "float32" else 2)


def first_window_page(num_tokens: int, window: int, page_size: int) -> int:
    """The first page of a sequence whose window page is kept behind `num_tokens` tokens.

    Neither the next token sees anything before it, nor one behind the last whole page, where a request may go on that
    finds the sequence cached.
    """
    return max(num_tokens // page_size * page_size + 1 - window, 0) // page_size


class KVLayout(Record, frozen=True):
    """What two nodes must agree on before KV pages may move between them.

    `fingerprint` is a digest of the checkpoint. One page of all layers holds
    2 * num_layers * num_kv_heads * page_size rows of head_dim elements.

    `numerics` names everything that decides about the bits of a token's KV and logits: the attention backend with its
    version, the instruction set and the type (`native-1/avx512_bf16/bfloat16`). Nodes of one fleet may differ in it;
    then no pages move between them, unless --allow-mixed-numerics permits it.

    `quantization` is the name of what the weights are quantized to, empty for none. `kv_cache_dtype` is the type of
    the pages, empty for `dtype`.

    `windows` are the window of each layer, 0 where a token sees its whole sequence. It is empty where all layers are
    one group: then every page holds all of them. Else layers with windows are a group of their own, whose pages exist
    only near the end of a sequence, and a transfer numbers layers group by group, those without windows first.
    """

    fingerprint: str
    dtype: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    numerics: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    windows: tuple[int, ...] = ()

    @property
    def num_window_layers(self) -> int:
        """Layers of the group with windows."""
        return sum(window > 0 for window in self.windows)

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of one token's KV in all layers."""
        row_nbytes = kv_row_nbytes(self.head_dim, self.kv_cache_dtype or self.dtype)
        return 2 * self.num_layers * self.num_kv_heads * row_nbytes


class NodeLimits(Record, frozen=True):
    """Bounds that the router checks before it dispatches, in tokens or requests."""

    context_length: int
    max_total_num_tokens: int
    max_running_requests: int


class LinkReport(msgspec.Struct, frozen=True, gc=False):
    """A link of a node that is ready for use.

    `peer` is an incarnation, `incoming` tells that pages arrive from it. `passed_over` are better transports, and why
    the link does not use them. It is an object on the wire, since routers show it as it comes.
    """

    peer: str
    incoming: bool
    transport: str
    passed_over: dict[str, str] = {}


class Load(Record, frozen=True):
    """A node's state, sent with every Pong. Page counts add up to `num_pages`.

    `progress` always grows: in the middle of a long forward, and also while the node is idle.
    """

    progress: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_transferring: int = 0
    num_bootstrapping: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_evictable_pages: int = 0
    num_held_pages: int = 0
    num_retractions: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    gen_throughput: float = 0.0
    kv_bytes_transferred: int = 0
    kv_transfer_s: float = 0.0
    num_links: int = 0
    num_retracted: int = 0
    num_retractions_host: int = 0
    num_retractions_recompute: int = 0
    num_retraction_waits: int = 0
    num_host_pages: int = 0
    num_free_host_pages: int = 0
    schedule_policy: str = ""
    """The policy in effect, which may be a simpler one than --schedule-policy."""
    num_jumped_tokens: int = 0
    """Output tokens that a grammar forced and no forward sampled; `num_generated_tokens` counts them as well."""
    links: tuple[LinkReport, ...] = ()
    """The `num_links` links: which of `--kv-transfer` each pair of nodes came to use."""
    unreachable: dict[str, str] = {}
    """Incarnations of nodes to which a link was lost or could not be built, and why. A new pair is not here: its
    link may still be on its way."""
    leak: str = ""
    """What an idle audit of the KV pages found. Such a node is to be drained."""
    prefill_busy_s: float = 0.0
    """How long forwards with prompt tokens have run here, in all."""
    num_queued_tokens: int = 0
    """Prompt tokens of the requests here that are to be computed here, and are not yet."""
    prefill_tokens_per_s: float = 0.0
    """What prefills usually reach here; 0 until one was measured."""
    reserve_wait_s: float = 0.0
    """How long the request that came first of those without a reservation has waited for it."""
    num_fetched_tokens: int = 0
    """Prompt tokens whose KV other nodes have lent, of those that were cached."""
    num_ahead_tokens: int = 0
    """Prompt tokens that were computed ahead of the reservation of their request."""
    num_ahead_evicted_tokens: int = 0
    """Those of them that were evicted before their request had its reservation or ended."""
    num_prompts: int = 0
    """The prompts of `num_prompt_tokens`."""
    kv_bytes_per_s: float = 0.0
    """What transfers that have ended well reach lately, sent and received; 0 until one was measured."""
    num_window_pages: int = 0
    """Of the layers with sliding windows; 0 where these have no pool of their own."""
    num_available_window_pages: int = 0
    """Those that are free, or that no request sees."""


class Finish(Record, frozen=True):
    """Why a sequence ended on a node: `stop` with the matched id, or `length`."""

    type: str
    matched: int | None = None


class ReqReport(Record, frozen=True):
    """What a node knows of a request: sent with its first token and with its finish."""

    cached_tokens: int = 0
    stamps: tuple[Stamp, ...] = ()
    kv_pages_transferred: int = 0
    kv_bytes_transferred: int = 0
    num_retractions: int = 0
    waited_for: str = ""
    """Not told any more; its place is kept for a node of the release before."""
    ahead_s: float = 0.0
    """Seconds of its stay in QUEUED on the prefill node in which its prompt was computed ahead of the reservation."""
    fetch_s: float = 0.0
    """How long it waited for pages that another node was to lend, and for how many tokens they came."""
    num_fetched_tokens: int = 0


class TokenEntry(Record, frozen=True):
    """Tokens of one request; `position` is the output position of the first of them.

    `logprobs` are those of `token_ids`, `input_logprobs` those of the prompt from the token after `start_len` on:
    they come with position 0, from each node that tells it. Both only where they were asked for.
    """

    key: ReqKey
    position: int
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    report: ReqReport | None = None
    logprobs: Logprobs | None = None
    input_logprobs: Logprobs | None = None


# ------------------------------------------------------------------------------------------- router → node
class RouterHello(Struct, frozen=True):
    """First message of a router on a fresh connection; answered with NodeHello or Refused.

    With `resume`, a node that was drained takes work again: an operator has added it anew.
    """

    router: str
    version: int = 0
    """The sender's PROTOCOL_VERSION; version 1 did not say it."""
    resume: bool = False


class Peers(Struct, frozen=True):
    """The decode nodes that a prefill node should hold links to. Sent whenever the set changes."""

    decode_nodes: tuple[NodeRef, ...]


class Source(Record, frozen=True):
    """A node that is asked to lend the first `num_pages` pages of a sequence, which it was seen to hold."""

    node: NodeRef
    num_pages: int


class Prefill(Struct, frozen=True):
    """Compute the KV of a sequence and sample its next token; `decode` continues after it, None: no node does.

    What a `source` lends need not be computed. With `evict_first`, the decode node keeps the prompt: if the
    transfer ends well, what this request adds to the RadixCache here is evicted before the rest.
    """

    key: ReqKey
    work: Work
    decode: NodeRef | None
    source: Source | None = None
    evict_first: bool = False


class Lend(Struct, frozen=True):
    """Send the cached pages of `work` to `borrower`, whose Prefill of the same key names this node as its source.

    It is not answered: the borrower hears what this node holds. Without `work`, see to it that there is a link.
    """

    since_version: ClassVar[int] = 9

    key: ReqKey
    borrower: NodeRef
    work: Work | None


class Decode(Struct, frozen=True):
    """Continue a sequence after its prefill on the node `prefill`; None: prefill it on the decode node.

    With a `local_prefill_limit`, a node that would have to compute more tokens than that answers NotCached. When the
    request is `moving`, `prefill` is the decode node that it leaves: room is reserved at once, or the answer is
    Failed with 503. With `alone_tokens`, the node runs nothing else until the request has so many tokens more: it
    has others moved, hands them back when that takes too long, says RunsAlone, and hands back what comes meanwhile.
    With `evict_first`, the prefill node keeps the prompt, and what this request adds to the RadixCache here is
    evicted before the rest.
    """

    key: ReqKey
    work: Work
    prefill: NodeRef | None
    local_prefill_limit: int | None = None
    moving: bool = False
    alone_tokens: int = 0
    evict_first: bool = False


class Move(Struct, frozen=True):
    """Send the running request `key` to the decode node `target`, where a Decode with `moving` names it `to_key`.

    The answer is Moved(key) once the target has all of it; its tokens were sent before that. Cancel(to_key) gives the
    move up. A move that fails leaves the request running as `key`, and Failed(to_key) comes from this node if the
    handoff had not been sent, else from the target.
    """

    key: ReqKey
    to_key: ReqKey
    target: NodeRef


class Cancel(Struct, frozen=True):
    """Give up a request: the client went away, or another party failed."""

    key: ReqKey


class Stop(Struct, frozen=True):
    """End a request that the router finished itself (a stop string); tokens from `position` on are not wanted."""

    key: ReqKey
    position: int


class Ping(Struct, frozen=True):
    """Liveness; answered with Pong by Python, not by the socket library."""

    seq: int


class Drain(Struct, frozen=True):
    """Tell every router, also those that come later, to send nothing new, and to hang up after `timeout_s`."""

    timeout_s: float


class SetRole(Struct, frozen=True):
    """Go on in another role, once no router has work here; answered with Answered.

    The node tells every router to send nothing new. Requests may run on for `drain_timeout_s`. A later Drain takes
    this back.
    """

    call_id: int
    role: Role
    drain_timeout_s: float


class Drained(Struct, frozen=True):
    """The router has no work left on the node, which has told it that it is to take another role."""


class Flush(Struct, frozen=True):
    """Empty the RadixCache; answered with Answered."""

    call_id: int


class CacheResync(Struct, frozen=True):
    """Some cache events are missing; answered with all blocks anew."""


class StartProfile(Struct, frozen=True):
    """Begin to trace the node, for `num_steps` steps or until StopProfile; answered with Answered."""

    call_id: int
    num_steps: int | None
    with_stack: bool
    record_shapes: bool


class StopProfile(Struct, frozen=True):
    """Write the trace; answered with Answered."""

    call_id: int


# ------------------------------------------------------------------------------------------- node → router
class NodeHello(Struct, frozen=True):
    """What a node is. `flags` are its resolved options, for /get_server_info."""

    node: NodeRef
    role: Role
    layout: KVLayout
    limits: NodeLimits
    flags: dict[str, str | int | float | bool | None]
    version: int = 0
    """As that of RouterHello."""
    fixed_role: bool = False
    """The node refuses SetRole: it was started with --fixed-role."""
    is_exact: bool = False
    """Whether a token has the same bits whatever forward computes it. If not, equal numerics do not promise that."""


class Refused(Struct, frozen=True):
    """The sender will not work with the receiver; `reason` names the field that differs."""

    reason: str


class Tokens(Struct, frozen=True):
    """All tokens of one step of a node."""

    entries: tuple[TokenEntry, ...]


class Failed(Struct, frozen=True):
    """A request ended without its result. `status` is the HTTP status that the client should see.

    With a `status` of 500 or more and no `param`, other nodes may serve it; with 503 no node is at fault. `blames` is
    the incarnation of the peer with which a transfer failed. `handed_back`: this node drains, or is to run another
    request alone.
    """

    key: ReqKey
    status: int
    message: str
    param: str | None = None
    blames: str = ""
    handed_back: bool = False


class Pong(Struct, frozen=True):
    """Answer to Ping, or unasked for, with `seq` 0, when a link has come or gone.

    `cache_seq` is that of the last CacheEvents sent before it; None: none have been sent.
    """

    seq: int
    load: Load
    cache_seq: int | None = None


class CacheEvents(Struct, frozen=True):
    """What a node's RadixCache gained and lost, by block hash (see `block_hash`); `seq` has no gaps.

    With `reset`, `stored` is all it holds: sent after RouterHello and CacheResync.
    """

    seq: int
    stored: tuple[int, ...]
    removed: tuple[int, ...]
    reset: bool = False


class NotCached(Struct, frozen=True):
    """The decode node holds less of a prompt than the router thought, and would exceed `local_prefill_limit`."""

    key: ReqKey


class Moved(Struct, frozen=True):
    """The request has left this node: the target of its Move has all of it, and goes on under the key of the move.

    If the target fails before its first message, no node has the request any more.
    """

    key: ReqKey


class RunsAlone(Struct, frozen=True):
    """This node is about to begin a Decode with `alone_tokens`, and holds no other request."""

    key: ReqKey


class MoveWanted(Struct, frozen=True):
    """These requests of the router run on this node, which is short of pages or is to be emptied: move them.

    A request is named once. It runs on here until it is moved or has ended.
    """

    keys: tuple[ReqKey, ...]


class Answered(Struct, frozen=True):
    """Whether a call (Flush, SetRole, StartProfile, StopProfile) is carried out, and what there is to say."""

    call_id: int
    ok: bool
    detail: str = ""


class Draining(Struct, frozen=True):
    """The node is drained: its requests may run on for `left_s`.

    With `stops` its process ends then, or when it has no request any more. With a `role` it comes back in this role,
    as a new incarnation. Otherwise an operator has removed the node.
    """

    left_s: float
    stops: bool = False
    role: Role | None = None


class Leaving(Struct, frozen=True):
    """The sender, a node or a router, goes away, and says why.

    A node has `crashed` when it ends by an error, of which a request may be the cause.
    """

    reason: str
    crashed: bool = False


# ------------------------------------------------------------ router → node → all its other routers
class AbortedReqs(Struct, frozen=True):
    """A client wants the requests of this rid to end, or an operator all requests (None)."""

    rid: Annotated[str, msgspec.Meta(max_length=MAX_RELAYED_CHARS)] | None


class AddedNode(Struct, frozen=True):
    """An operator has added a node. Nodes tell routers that come later, until they hear that it was removed."""

    role: Role
    address: Annotated[str, msgspec.Meta(max_length=MAX_RELAYED_CHARS)]
    incarnation: Annotated[str, msgspec.Meta(max_length=MAX_RELAYED_CHARS)]
    at: float = 0.0
    """Seconds since the epoch. Read by the version before alone."""


class RemovedNode(Struct, frozen=True):
    """An operator has removed a node; its requests may run on for `drain_timeout_s`."""

    address: Annotated[str, msgspec.Meta(max_length=MAX_RELAYED_CHARS)]
    incarnation: Annotated[str, msgspec.Meta(max_length=MAX_RELAYED_CHARS)]
    drain_timeout_s: float
    at: float = 0.0
    """As of AddedNode."""


RouterNews = AbortedReqs | AddedNode | RemovedNode


class Relay(Struct, frozen=True):
    """News from a router, of this incarnation, to all others that share a node with it.

    The news comes through every such node; `number` tells that it is the same.
    """

    router: str
    number: int
    news: RouterNews


# --------------------------------------------------------------------- node → router's control port
class Loading(Struct, frozen=True):
    """Progress of a node that is starting (`fraction` of `what`, 0 to 1)."""

    node_id: str
    role: Role
    what: str
    fraction: float


class Join(Struct, frozen=True):
    """A node asks the router to dial it. Repeated until the router has done so."""

    node: NodeRef
    role: Role


class LoadFailed(Struct, frozen=True):
    """A node could not start."""

    node_id: str
    role: Role
    reason: str


RouterToNode = (
    RouterHello
    | Peers
    | Lend
    | Prefill
    | Decode
    | Move
    | Cancel
    | Stop
    | Ping
    | Flush
    | StartProfile
    | StopProfile
    | CacheResync
    | Drain
    | SetRole
    | Drained
    | Relay
    | Leaving
)
NodeToRouter = (
    NodeHello
    | Refused
    | Tokens
    | Failed
    | Pong
    | Answered
    | CacheEvents
    | NotCached
    | Moved
    | RunsAlone
    | MoveWanted
    | Draining
    | Relay
    | Leaving
)
Announcement = Loading | Join | LoadFailed
