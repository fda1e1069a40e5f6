"""A tokenizer file rebuilt from the sentencepiece vocabulary of a GGUF file, as the Gemma family uses it. Torch-free.

The file holds no merges: every way to cut a token into two others is one, and the order of the vocabulary, which is
the order in which the tokens were learned, is their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

SPACE = "\u2581"
# Token types of GGUF vocabularies.
NORMAL, USER_DEFINED = 1, 4


def sentencepiece_json(
    metadata: Mapping[str, Any], added_tokens: Sequence[Mapping[str, Any]], post_processor: Mapping[str, Any] | None
) -> str:
    """The `tokenizer.json` text of a vocabulary that puts no space before a text and falls back to bytes."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    # Runs of spaces are stored as such, and looked up as every other space is.
    spelled = [SPACE * len(token) if token.strip(" ") == "" else token for token in tokens]
    vocab = {token: token_id for token_id, token in enumerate(spelled)}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token for token in added_tokens if token["content"].strip(" ")],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": post_processor,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else spelled[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(spelled, types, vocab),
        },
    }
    return json.dumps(document, ensure_ascii=False)


def _merges(tokens: Sequence[str], types: Sequence[int], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for token, kind in zip(tokens, types, strict=True):
        if kind not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((left, right))
    return merges
