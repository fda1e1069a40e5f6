"""Token ids in the form in which prefixes are compared: big-endian 32-bit integers, one after another.

The order of the bytes is then the order of the tokens, a common prefix of bytes is a common prefix of tokens, and a
long prompt is compared in one step. Encoded once, where a prompt enters the engine; nobody converts it again.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
LAST = struct.Struct(">I")
FEW_TOKENS = 16  # so many are unpacked faster than an array is made


class EncodedTokens(Sequence[int]):
    """Known token ids, growing at the end. `encoded` is the bytes themselves: read it, change it by `extend` only.

    Whoever keeps `encoded` sees it grow. No view of it (memoryview, array) may be kept: it could not grow then.
    """

    __slots__ = ("encoded",)

    def __init__(self, token_ids: TokenIds = ()) -> None:
        """A copy. Raises ValueError for ids outside [0, 2**32)."""
        self.encoded = bytearray(encode_tokens(token_ids))

    @classmethod
    def from_bytes(cls, data: bytes) -> EncodedTokens:
        """Of what `encoded` holds. Raises ValueError when it is not whole tokens."""
        if len(data) % TOKEN_BYTES:
            raise ValueError(f"{len(data)} bytes are not a whole number of tokens")
        made = cls.__new__(cls)
        made.encoded = bytearray(data)
        return made

    def extend(self, token_ids: TokenIds) -> None:
        """Raises ValueError, with nothing changed, for ids outside [0, 2**32)."""
        self.encoded += encode_tokens(token_ids)

    def starts_alike(self, other: EncodedTokens, num_tokens: int) -> bool:
        """Whether both have that many tokens, and the same."""
        if min(len(self), len(other)) < num_tokens:
            return False
        return common_tokens(self.encoded, other.encoded, num_tokens) == num_tokens

    def largest(self) -> int:
        """The largest id of at least one."""
        return int(np.frombuffer(self.encoded, ">u4").max())

    @property
    def last(self) -> int:
        """The last id of at least one. Raises ValueError where there is none."""
        if not self.encoded:
            raise ValueError("there is no last token")
        last: int = LAST.unpack_from(self.encoded, -TOKEN_BYTES)[0]
        return last

    def __len__(self) -> int:
        return len(self.encoded) // TOKEN_BYTES

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if not isinstance(index, slice):
            place = range(len(self))[index] * TOKEN_BYTES
            return int.from_bytes(self.encoded[place : place + TOKEN_BYTES], "big")
        start, stop, step = index.indices(len(self))
        part = self.encoded[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        found = decode_tokens(part)
        return found if step == 1 else [self[place] for place in range(start, stop, step)]

    def __iter__(self) -> Iterator[int]:
        return iter(decode_tokens(self.encoded))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EncodedTokens):
            return self.encoded == other.encoded
        return list(self) == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"EncodedTokens({list(self)})"


TokenIds = EncodedTokens | Sequence[int] | npt.NDArray[np.integer[Any]]


def encode_tokens(token_ids: TokenIds) -> bytes | bytearray:
    """The bytes of some tokens, TOKEN_BYTES each; of EncodedTokens their own, which go on growing.

    Raises ValueError for ids that are negative or do not fit in 32 bits: wrapped around, they would match others.
    """
    if isinstance(token_ids, EncodedTokens):
        return token_ids.encoded
    if isinstance(token_ids, list):
        try:
            ids = array("I", token_ids)  # several times as fast as by way of numpy
        except OverflowError:
            raise ValueError("token ids must lie in [0, 2**32)") from None
        if sys.byteorder == "little":
            ids.byteswap()
        return ids.tobytes()
    values = np.asarray(token_ids, dtype=np.int64)
    if values.size and (int(values.min()) < 0 or int(values.max()) >= 1 << 32):
        raise ValueError("token ids must lie in [0, 2**32)")
    return values.astype(">u4").tobytes()


def decode_tokens(encoded: bytes | bytearray) -> list[int]:
    """The ids that some bytes stand for."""
    num_tokens = len(encoded) // TOKEN_BYTES
    if num_tokens <= FEW_TOKENS:
        return list(struct.unpack(f">{num_tokens}I", encoded))
    ids: list[int] = np.frombuffer(encoded, ">u4").tolist()
    return ids


def page_digests(digest: int, encoded: bytes | bytearray, start: int, page_size: int) -> list[int]:
    """`digest`, which is that of the first `start` tokens, and those after each further full page. O(those pages).

    What is looked up by digests only steers and reports: tokens decide what matches.
    """
    digests, width = [digest], page_size * TOKEN_BYTES
    data = bytes(memoryview(encoded)[start * TOKEN_BYTES :])
    for offset in range(0, len(data) - width + 1, width):
        digest = hash((digest, data[offset : offset + width]))
        digests.append(digest)
    return digests


def common_tokens(first: bytes | bytearray, second: bytes | bytearray, limit: int) -> int:
    """Leading tokens that both share, at most `limit`. One comparison of memory where they share all."""
    limit = min(limit, len(first) // TOKEN_BYTES, len(second) // TOKEN_BYTES)
    if limit <= 0:
        return 0
    if first.startswith(memoryview(second)[: limit * TOKEN_BYTES]):
        return limit
    ours = np.frombuffer(first, np.uint32, limit)
    theirs = np.frombuffer(second, np.uint32, limit)
    return int((ours == theirs).argmin())
