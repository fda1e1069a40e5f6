"""The signature of a thinking block: it carries the reasoning itself, so that the block can come back exactly.

Clients return it unread, while they may trim the text of the block, or were never shown it. It is not a secret and
proves nothing: what a client puts there is as much its own word as any text it sends.
"""

from __future__ import annotations

import base64
import binascii
import zlib

PREFIX = "tk1."
MAX_REASONING_BYTES = 4 * 2**20


def make_signature(reasoning: str) -> str:
    """A signature for a whole block."""
    return PREFIX + base64.b64encode(zlib.compress(reasoning.encode(), 1)).decode()


def read_signature(signature: object) -> str | None:
    """The reasoning of a signature made here, None for any other."""
    if not isinstance(signature, str) or not signature.startswith(PREFIX):
        return None
    try:
        data = base64.b64decode(signature[len(PREFIX) :], validate=True)
        unpacked = zlib.decompressobj()
        text = unpacked.decompress(data, MAX_REASONING_BYTES)
        return text.decode() if unpacked.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
