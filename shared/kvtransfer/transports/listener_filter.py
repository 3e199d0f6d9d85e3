"""Closes the port that gloo listens on, once it has served its purpose.

A gloo device listens for as long as its pair lives, keeps a descriptor for each connection that it accepted, and
aborts the process when there are none left. The socket belongs to gloo: when it is shut down or closed from outside,
gloo aborts the process too. So the kernel is told to drop what arrives at the listening socket, before it becomes a
connection. The pair's own connection is a socket of its own by then and is not affected.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator

_SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>; Python does not name it
_BPF_RETURN_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes of every packet


def drop_connections(published: Iterable[bytes]) -> int:
    """Drop what arrives at each listening socket of this process whose address is in a `published` rendezvous entry.

    Returns how many such sockets there are. OSError: the system has no such filter, or no /proc.
    """
    entries, num_closed = list(published), 0
    for listener in _listening_sockets():
        with listener:
            address = _sockaddr(listener)
            if any(address in entry for entry in entries):
                program = ctypes.create_string_buffer(_BPF_RETURN_NOTHING, len(_BPF_RETURN_NOTHING))
                fprog = struct.pack("@HP", 1, ctypes.addressof(program))
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)
                num_closed += 1
    return num_closed


def _listening_sockets() -> Iterator[socket.socket]:
    """A duplicate of each TCP socket of this process that listens."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            descriptor = os.dup(int(name))
        except OSError:  # closed meanwhile by the thread that it belongs to
            continue
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError:  # no socket any more
            os.close(descriptor)
            continue
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            yield sock
        else:
            sock.close()


def _sockaddr(sock: socket.socket) -> bytes:
    """The start of the C structure that holds the address of `sock`, as gloo publishes it."""
    host, port = sock.getsockname()[:2]
    head = struct.pack("=H", sock.family) + struct.pack("!H", port)
    if sock.family == socket.AF_INET:
        return head + socket.inet_pton(socket.AF_INET, host)
    return head + bytes(4) + socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
