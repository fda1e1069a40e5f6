"""A tokenizer file rebuilt from the tokenizer metadata of a GGUF file, for byte-level BPE vocabularies; those of Gemma
are built by `gguf_sentencepiece.py`.

Gives the text of a `tokenizer.json`. Torch-free. The pre-tokenizer is chosen by the name in the metadata; a name
that is not known here is an error, because splitting text in another way silently gives other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from turnkeep.models.gguf_sentencepiece import sentencepiece_json

# Token types of GGUF vocabularies.
CONTROL, USER_DEFINED = 3, 4

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_SPLIT = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# Names of pre-tokenizers that llama.cpp treats alike.
LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2")
LIKE_SMOLLM = ("smollm", "refact", "starcoder")
KNOWN = ("gpt-2", "qwen2", *LIKE_LLAMA3, *LIKE_SMOLLM)


class TokenizerMetadataError(ValueError):
    """The tokenizer in a GGUF file is of a kind that cannot be rebuilt, or is incomplete."""


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    isolate = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [isolate, _byte_level(use_regex=False)]}


def _digits() -> dict[str, Any]:
    digits = {"type": "Digits", "individual_digits": True}
    return {"type": "Sequence", "pretokenizers": [digits, _byte_level(use_regex=True)]}


def _pre_tokenizer(name: str) -> dict[str, Any]:
    if name in LIKE_LLAMA3:
        return _split(LLAMA3_SPLIT)
    if name == "qwen2":
        return _split(QWEN2_SPLIT)
    if name in LIKE_SMOLLM:
        return _digits()
    if name == "gpt-2":
        return _byte_level(use_regex=True)
    raise TokenizerMetadataError(
        f"pre-tokenizer {name!r} is not known (known: {', '.join(sorted(KNOWN))}); "
        "use the model's Hugging Face folder instead"
    )


def _post_processor(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", False) or bos is None:
        return None
    if bos >= len(tokens):
        raise TokenizerMetadataError(f"the beginning token {bos} is none of the {len(tokens)} tokens")
    content = tokens[bos]
    start = {"SpecialToken": {"id": content, "type_id": 0}}
    single = [start, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {content: {"id": content, "ids": [bos], "tokens": [content]}},
    }


def _added_tokens(tokens: list[str], token_types: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_type == CONTROL,
        }
        for token_id, (content, token_type) in enumerate(zip(tokens, token_types, strict=True))
        if token_type in (CONTROL, USER_DEFINED)
    ]


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """The `tokenizer.json` text for this metadata. Raises TokenizerMetadataError."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama" and str(metadata.get("general.architecture")).startswith("gemma"):
        return _sentencepiece(metadata)
    if kind != "gpt2":
        raise TokenizerMetadataError(
            f"tokenizer model {kind!r} is not supported, only 'gpt2' (byte-level BPE) and that of Gemma; "
            "use the model's Hugging Face folder instead"
        )
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not tokens or not merges:
        raise TokenizerMetadataError("the metadata has no tokens or no merges")
    token_types = _token_types(metadata, tokens)
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, token_types),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _pre_tokenizer(pre),
        "post_processor": _post_processor(metadata, tokens),
        "decoder": _byte_level(use_regex=True) | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # Llama 3 looks a whole piece up before it merges; its vocabulary holds pieces no merge reaches.
            "ignore_merges": pre in LIKE_LLAMA3,
            "vocab": {content: token_id for token_id, content in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    return json.dumps(document, ensure_ascii=False)


def _token_types(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    token_types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(token_types) != len(tokens):
        raise TokenizerMetadataError(f"the metadata has {len(tokens)} tokens but {len(token_types)} token types")
    return token_types


def _sentencepiece(metadata: Mapping[str, Any]) -> str:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerMetadataError("the metadata has no tokens")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise TokenizerMetadataError("vocabularies that put a space before a text are not supported")
    added = _added_tokens(tokens, _token_types(metadata, tokens))
    return sentencepiece_json(metadata, added, _post_processor(metadata, tokens))
