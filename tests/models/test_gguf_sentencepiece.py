"""Sentencepiece vocabularies of Gemma files: merges in the order of the vocabulary, spaces, bytes, added tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from turnkeep.models.gguf_tokenizer import TokenizerMetadataError, tokenizer_json

S = "\u2581"
CONTROL, NORMAL, USER_DEFINED, BYTE = 3, 1, 4, 6
BYTES = [f"<0x{value:02X}>" for value in range(256)]
PIECES = ["ab", "bc", f"{S}a", "abc", "a", "b", "c", S, "1"]
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "\n\n", "  ", *BYTES, *PIECES]
TYPES = [CONTROL] * 5 + [USER_DEFINED] * 2 + [BYTE] * 256 + [NORMAL] * len(PIECES)


def metadata(**changes: Any) -> dict[str, Any]:
    values = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return values | {key.replace("__", "."): value for key, value in changes.items()}


def encoded(text: str, **changes: Any) -> list[str]:
    tokenizer = Tokenizer.from_str(tokenizer_json(metadata(**changes)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    return [TOKENS[token_id] for token_id in ids]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["abc"]),  # "ab" is older than "bc", and "ab" and "c" make a token
        ("bcab", ["bc", "ab"]),
        (" ab", [S, "ab"]),  # "ab" is older than a space and "a"
        (" a", [f"{S}a"]),
        ("a  b", ["a", "  ", "b"]),
        ("a\n\nb", ["a", "\n\n", "b"]),
        ("a\nb", ["a", "<0x0A>", "b"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("a<end_of_turn>b", ["a", "<end_of_turn>", "b"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_learned(text: str, pieces: list[str]) -> None:
    assert encoded(text) == pieces


def test_the_beginning_token_is_added_where_the_metadata_asks_for_it() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(metadata()))
    assert tokenizer.encode("a").ids == [2, TOKENS.index("a")]
    plain = Tokenizer.from_str(tokenizer_json(metadata(tokenizer__ggml__add_bos_token=False)))
    assert plain.encode("a").ids == [TOKENS.index("a")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"tokenizer__ggml__add_space_prefix": True}, "put a space before a text"),
        ({"tokenizer__ggml__tokens": []}, "no tokens"),
        ({"tokenizer__ggml__token_type": [1]}, "but 1 token types"),
    ],
)
def test_other_sentencepiece_vocabularies_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerMetadataError, match=message):
        tokenizer_json(metadata(**changes))
