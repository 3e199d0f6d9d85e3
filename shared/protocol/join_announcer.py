"""How a node that was given `--router` makes itself known: it calls the router's control port until dialled."""

from __future__ import annotations

import threading

import msgspec

from shared import log
from shared.config import DEFAULT_CONTROL_PORT
from shared.errors import ConfigError
from shared.protocol.channel import ControlThread, Handlers
from shared.protocol.messages import Announcement, Join, Loading, NodeRef, Refused, Role

JOIN_INTERVAL_S = 2.0


def control_address(router: str) -> str:
    """`HOST[:PORT]` as a ZMQ address. Raises ConfigError."""
    host, colon, port = router.partition(":")
    if not host or (colon and not port.isdecimal()):
        raise ConfigError(f"--router {router}: expected HOST or HOST:PORT")
    return f"tcp://{host}:{port or DEFAULT_CONTROL_PORT}"


class JoinAnnouncer:
    """Tells every router given how far loading is, then asks to be dialled, every two seconds until `stop`.

    A router that knows the node ignores the request; one that was restarted needs it. A router that hears nothing of
    a node that was loading takes it for dead.
    """

    def __init__(
        self,
        control: ControlThread,
        node: NodeRef,
        role: Role,
        routers: tuple[str, ...],
        interval_s: float = JOIN_INTERVAL_S,
    ) -> None:
        self._control = control
        self._node = node
        self._role = role
        self._addresses = {f"join {router}": control_address(router) for router in routers}
        self._closed: set[str] = set()
        """Routers without a connection. `say` dials them."""
        self._warned: set[str] = set()
        """Routers that could not be reached since they were last connected; one warning for each such time."""
        self._lock = threading.Lock()
        self._message: Announcement | None = None
        """What was said last, and is said again and again."""
        for peer in self._addresses:
            self._dial(peer)
        if self._addresses:
            control.every(interval_s, self._repeat)

    def loading(self, what: str, fraction: float) -> None:
        """Tell how far the node has loaded."""
        self.say(Loading(self._node.node_id, self._role, what, fraction))

    def say(self, message: Announcement) -> None:
        """Send a message to every router given, again and again."""
        with self._lock:
            self._message = message
            self._send(message)

    def start(self) -> None:
        """Ask to be dialled, since the node is ready."""
        self.say(Join(self._node, self._role))

    def stop(self) -> None:
        """Ask no more."""
        with self._lock:
            self._message = None

    def _repeat(self) -> None:
        with self._lock:
            if self._message is not None:
                self._send(self._message)

    def _send(self, message: Announcement) -> None:
        for peer in self._addresses:
            if peer in self._closed:
                self._closed.discard(peer)
                self._dial(peer)
            self._control.to_dialled.send(peer, message)

    def _dial(self, peer: str) -> None:
        self._control.dial(
            peer,
            self._addresses[peer],
            f"node|{self._node.incarnation}",
            Handlers(msgspec.msgpack.Decoder(Refused), lambda peer, message: None),
            on_connected=self._warned.discard,
            on_disconnected=self._on_closed,
        )

    def _on_closed(self, peer: str, reason: str) -> None:
        if peer not in self._warned:
            self._warned.add(peer)
            hint = "is it a router's control port, open to this host (--control-host), with the same --fleet-key?"
            log.warn("router_unreachable", router=self._addresses[peer], reason=reason, hint=hint)
        self._closed.add(peer)
