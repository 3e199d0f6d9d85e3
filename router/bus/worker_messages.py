"""What the parent of a router and its workers say to each other.

parent → worker   ToWorker     how to begin, what nodes announce, questions of other workers, answers of theirs
worker → parent   ToParent     ready, questions to the other workers, answers to theirs, changes of the fleet
"""

from __future__ import annotations

from shared.protocol.messages import NodeToLobby, Record, Role, Struct


# ------------------------------------------------------------------------------------- between workers
class AbortReqs(Struct, frozen=True):
    """End the requests of this name, or all; answered with NumAborted."""

    rid: str | None


class TellMetrics(Struct, frozen=True):
    """Answered with MetricFamilies."""


class DialNode(Struct, frozen=True):
    """Dial a node, and keep dialling it if that fails; answered with Changed."""

    role: Role
    address: str


class DrainNode(Struct, frozen=True):
    """Drain a node; answered with Changed when it is gone. Its incarnation, if known, is not let in again."""

    address: str
    incarnation: str
    drain_timeout_s: float


class Prove(Struct, frozen=True):
    """Complete a prompt greedily; answered with Proof."""

    prompt: str
    max_new_tokens: int


class NumAborted(Struct, frozen=True):
    """How many sequences there were."""

    num_reqs: int


class Sample(Record, frozen=True):
    """One value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


class Family(Record, frozen=True):
    """A metric, as Prometheus' client library has it."""

    name: str
    documentation: str
    type: str
    samples: tuple[Sample, ...]


class MetricFamilies(Struct, frozen=True):
    """All of a worker but the figures of its nodes, which every worker has."""

    families: tuple[Family, ...]


class Changed(Struct, frozen=True):
    """The fleet is as was asked for; how many requests had to be ended for that."""

    num_ended: int = 0


class Proof(Struct, frozen=True):
    """What the prompt was completed with."""

    text: str


class NotDone(Struct, frozen=True):
    """The worker could not do what it was asked for."""

    reason: str


Question = AbortReqs | TellMetrics | DialNode | DrainNode | Prove
Answer = NumAborted | MetricFamilies | Changed | Proof | NotDone


# ------------------------------------------------------------------------------------ parent → worker
class Begin(Struct, frozen=True):
    """The first message: where to listen, and what has become of the fleet that the flags named.

    `node_ids` are the nodes of this machine that must serve before a first start is over. A `restarted` worker
    listens only when it can serve, since others serve meanwhile.
    """

    http_port: int
    join: tuple[tuple[Role, str], ...]
    turned_away: tuple[str, ...]
    known: tuple[NodeToLobby, ...]
    node_ids: tuple[str, ...]
    restarted: bool


class Announced(Struct, frozen=True):
    """A node has said this at the control port."""

    message: NodeToLobby


class Gone(Struct, frozen=True):
    """A node that the parent had started has ended."""

    node_id: str
    reason: str


class Asked(Struct, frozen=True):
    """Answer this with Answered."""

    call_id: int
    question: Question


class Replies(Struct, frozen=True):
    """What the other workers said, by name; `silent` did not answer in time."""

    call_id: int
    answers: dict[str, Answer]
    silent: tuple[str, ...]


class Check(Struct, frozen=True):
    """Is the event loop alive? Answered with Checked."""


class ReloadKeys(Struct, frozen=True):
    """Read the files with keys again. A signal would kill a worker that is still starting."""


# ------------------------------------------------------------------------------------ worker → parent
class Loaded(Struct, frozen=True):
    """Tokenizer and templates are read; from now on Check is answered."""


class Ready(Struct, frozen=True):
    """The fleet is there, as this worker sees it, and this is what clients call its model."""

    model_name: str


class CannotStart(Struct, frozen=True):
    """A flag, file or node is wrong; the worker ends with this."""

    reason: str


class Ask(Struct, frozen=True):
    """Ask all other workers, and send Replies after `timeout_s` at the latest."""

    call_id: int
    question: Question
    timeout_s: float


class Answered(Struct, frozen=True):
    """The answer to Asked."""

    call_id: int
    answer: Answer


class MemberAdded(Struct, frozen=True):
    """A worker that starts later has to dial this one too."""

    role: Role
    address: str
    incarnation: str


class MemberRemoved(Struct, frozen=True):
    """A worker that starts later must not dial this one, nor let this incarnation in. It may not be known."""

    address: str
    incarnation: str


class Checked(Struct, frozen=True):
    """The answer to Check."""


ToWorker = Begin | Announced | Gone | Asked | Replies | Check | ReloadKeys
ToParent = Loaded | Ready | CannotStart | Ask | Answered | MemberAdded | MemberRemoved | Checked
