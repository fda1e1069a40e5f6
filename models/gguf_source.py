"""A GGUF file as a model source: its metadata in Hugging Face terms, and its tensor names translated. Torch-free.

Each architecture is a table of metadata keys and of tensor names. Weights are read by `weights.py`.
"""

from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from turnkeep.models.gguf_metadata import GGUFError, GGUFHeader, read_gguf_header
from turnkeep.models.gguf_tokenizer import TokenizerMetadataError, tokenizer_json
from turnkeep.models.model_source import ModelFilesError

# End markers of GGUF vocabularies: end of sequence, of turn, of message.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
F32 = 0

LLAMA_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_DIVISORS = "rope_freqs.weight"


class GGUFSource:
    """A GGUF file. Raises ModelFilesError naming the file and what is wrong with it."""

    kind: Literal["gguf"] = "gguf"

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    @cached_property
    def header(self) -> GGUFHeader:
        try:
            return read_gguf_header(self.path)
        except (GGUFError, OSError) as error:
            raise ModelFilesError(str(error)) from error

    def _value(self, key: str) -> Any:
        architecture = self.header.metadata.get("general.architecture")
        value = self.header.metadata.get(f"{architecture}.{key}")
        if value is None:
            raise ModelFilesError(f"{self.path}: metadata {architecture}.{key} is missing")
        return value

    def _integer(self, key: str) -> int:
        value = self._value(key)
        if not isinstance(value, int):
            raise ModelFilesError(f"{self.path}: {key} must be one integer for all blocks, not {value!r}")
        return value

    def config_dict(self) -> dict[str, Any]:
        metadata = self.header.metadata
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise ModelFilesError(f"{self.path}: architecture {architecture!r} is not supported (supported: llama)")
        if "llama.expert_count" in metadata:
            raise ModelFilesError(f"{self.path}: a mixture of experts is not supported")
        num_heads, num_kv_heads = self._head_counts()
        hidden_size = self._integer("embedding_length")
        head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
        tensors = self.header.tensors
        return {
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": self._value("feed_forward_length"),
            "num_hidden_layers": self._value("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": metadata.get("llama.vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
            "max_position_embeddings": self._value("context_length"),
            # A float32 in the file: 1e-5 would read 9.99999974e-06, and the model was trained with the decimal.
            "rms_norm_eps": float(f"{self._value('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": self._rope_parameters(head_dim),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(self.eos_token_ids),
        }

    def _head_counts(self) -> tuple[int, int]:
        num_heads = self._integer("attention.head_count")
        has_groups = "llama.attention.head_count_kv" in self.header.metadata
        return num_heads, self._integer("attention.head_count_kv") if has_groups else num_heads

    def _rope_parameters(self, head_dim: int) -> dict[str, Any]:
        metadata = self.header.metadata
        if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
            raise ModelFilesError(f"{self.path}: rotating a part of the head is not supported")
        scaling = metadata.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise ModelFilesError(f"{self.path}: rope scaling {scaling!r} is not supported")
        parameters = {"rope_type": "default", "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0))}
        divisors = self.header.tensors.get(ROPE_DIVISORS)
        if divisors is None:
            return parameters
        if divisors.type_id != F32:
            raise ModelFilesError(f"{self.path}: {ROPE_DIVISORS} must be float32")
        values = np.fromfile(self.path, dtype="<f4", count=math.prod(divisors.shape), offset=divisors.offset)
        return parameters | {"rope_type": "divisors", "divisors": values.tolist()}

    def tensor_names(self) -> dict[str, str]:
        """Hugging Face name -> name in the file, of every weight (what config_dict already holds is left out)."""
        names = {}
        for name in self.header.tensors:
            if name == ROPE_DIVISORS:
                continue
            block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if block and block[2] in LLAMA_BLOCK_TENSORS:
                names[f"model.layers.{block[1]}.{LLAMA_BLOCK_TENSORS[block[2]]}.{block[3]}"] = name
                continue
            stem, _, suffix = name.rpartition(".")
            names[f"{LLAMA_TENSORS[stem]}.{suffix}" if stem in LLAMA_TENSORS else name] = name
        return names

    def interleaved_heads(self, name: str) -> int | None:
        """Heads of the tensor called `name` in the file if its rows pair rotated dimensions next to each other.

        llama.cpp rotates (2i, 2i + 1) where Hugging Face rotates (i, i + D/2), and permutes q and k rows to suit.
        """
        if ".attn_q." in name:
            return self._head_counts()[0]
        return self._head_counts()[1] if ".attn_k." in name else None

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer_json(self) -> str:
        try:
            return tokenizer_json(self.header.metadata)
        except TokenizerMetadataError as error:
            raise ModelFilesError(f"{self.path}: {error}") from error

    def chat_template(self, name: str | None = None) -> str | None:
        key = "tokenizer.chat_template" if name in (None, "default") else f"tokenizer.chat_template.{name}"
        value: str | None = self.header.metadata.get(key)
        return value

    def special_tokens(self) -> dict[str, str]:
        tokens = self.header.metadata.get("tokenizer.ggml.tokens", [])
        ids = {name: self.header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_KEYS.items()}
        return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens().get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens().get("eos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = (self.header.metadata.get(f"tokenizer.ggml.{key}") for key in EOS_KEYS)
        return tuple(dict.fromkeys(i for i in ids if i is not None))
