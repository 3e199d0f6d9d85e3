"""What --log-requests tells of the text of a prompt: a keyed hash of its first 64 tokens, its first 128, and so on.

Two prompts have a hash in common where they may share that prefix in a cache, which is what a plan needs to know of
reuse. Without the key a hash tells nothing of the tokens. A prompt of fewer than 64 tokens has none. A reader of the
log who may also send requests, under the same API key, can test a guess: the router logs the same hash for it if the
guess is right. The guess must have a whole block of 64 tokens, and everything before it.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from array import array

from shared.protocol.block_hash import root_hash
from shared.protocol.messages import Work

BLOCK_TOKENS = 64
HASH_NBYTES = 8
KEY_NBYTES = 32


class PrefixHasher:
    """Hashes prefixes under a key that is never logged. Routers that are to agree are given the same key."""

    def __init__(self) -> None:
        self.use(secrets.token_bytes(KEY_NBYTES))

    def use(self, key: bytes) -> None:
        """Hash with `key` from now on. `key_id` names it in the log: hashes under two keys cannot be compared."""
        self._key = key
        self.key_id = hashlib.blake2b(key=key, digest_size=4, person=b"baton-log-key-id").hexdigest()

    def hashes(self, work: Work) -> str:
        """One hash for each whole block of the prompt, over all tokens up to its end: base64, 8 bytes each.

        About 35 µs for 1000 tokens (2 cores).
        """
        num_tokens = len(work.input_ids) // BLOCK_TOKENS * BLOCK_TOKENS
        ids = memoryview(array("q", work.input_ids[:num_tokens])).cast("B")
        step = BLOCK_TOKENS * array("q").itemsize
        prefix = hashlib.blake2b(key=self._key, digest_size=HASH_NBYTES, person=b"baton-log-prefix")
        prefix.update(root_hash(work.extra_key).to_bytes(8, "little"))
        packed = bytearray()
        for at in range(0, len(ids), step):
            prefix.update(ids[at : at + step])
            packed += prefix.copy().digest()
        return base64.urlsafe_b64encode(packed).decode()
