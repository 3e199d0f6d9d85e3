"""Both ends of a new link prove that they hold the secret of its LinkOpen.

gloo and NCCL authenticate nobody: a stranger who connects to a gloo port can take a place in a pair group and
be sent the victim's data.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

from shared.errors import LinkError
from shared.kvtransfer.link import LinkSpec

NBYTES = 32


def challenge(spec: LinkSpec, exchange: Callable[[int, bytes], bytes]) -> None:
    """Raise LinkError unless the peer passes. `exchange(round, ours)` swaps NBYTES with it."""
    ours = secrets.token_bytes(NBYTES)
    theirs = exchange(0, ours)
    proof = exchange(1, _mac(spec, spec.rank, theirs))
    if not hmac.compare_digest(proof, _mac(spec, 1 - spec.rank, ours)):
        raise LinkError(f"the peer of link {spec.name} failed the challenge")


def _mac(spec: LinkSpec, rank: int, nonce: bytes) -> bytes:
    # The rank is in it, so that a proof cannot be reflected to the one who asked for it.
    return hmac.new(spec.secret, b"%d/%s/" % (rank, spec.name.encode()) + nonce, hashlib.sha256).digest()
