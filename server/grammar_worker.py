"""The process in which grammars are compiled for the first time: `python -m turnkeep.server.grammar_worker`.

Frames of a 4-byte length and msgpack on standard input and output. The first holds the tokenizer and is answered with
the ids that stand for themselves in grammars; each later one holds a grammar and is answered with what is wrong with
it, or nothing. Whoever started this process kills it when it takes too long.
"""

from __future__ import annotations

import resource
import sys
from typing import BinaryIO

import msgspec

MAX_MEMORY_BYTES = 4 * 2**30  # address space; a tokenizer of 150,000 tokens takes a few hundred MB


class Tokenizer(msgspec.Struct):
    """The first frame."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body, None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    return stream.read(int.from_bytes(header, "big"))


def write_frame(stream: BinaryIO, value: object) -> None:
    body = msgspec.msgpack.encode(value)
    stream.write(len(body).to_bytes(4, "big") + body)
    stream.flush()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until the requests end. Raises ImportError where llguidance is missing."""
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.numpy import fill_next_token_bitmask

    first = read_frame(requests)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Tokenizer)
    tokenizer = LLTokenizer(setup.tokenizer_json, n_vocab=setup.vocab_size, eos_token=setup.eos_token_ids)
    special = [token_id for token_id in range(setup.vocab_size) if tokenizer.is_special_token(token_id)]
    write_frame(answers, special)
    words = np.zeros((1, -(-setup.vocab_size // 32)), dtype=np.int32)
    while (frame := read_frame(requests)) is not None:
        matcher = LLMatcher(tokenizer, msgspec.msgpack.decode(frame, type=str), log_level=0)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, words, 0)
        error = matcher.get_error() if matcher.is_error() else ""
        write_frame(answers, error.strip().partition("\n")[0])


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
