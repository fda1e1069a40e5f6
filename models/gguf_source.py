"""A GGUF file as a model source: its metadata in Hugging Face terms, and its tensor names translated. Torch-free.

What each architecture's keys and names mean is in `gguf_architectures.py`. Weights are read by `checkpoint_files.py`.
"""

from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from turnkeep.models.gguf_architectures import ARCHITECTURES, GGUFArchitecture
from turnkeep.models.gguf_fields import GGUFFields, head_counts, num_own_blocks
from turnkeep.models.gguf_gated_delta import GATED_DELTA_ARCHITECTURES, value_head_order
from turnkeep.models.gguf_metadata import GGUFError, GGUFHeader, read_gguf_header
from turnkeep.models.gguf_tokenizer import TokenizerMetadataError, tokenizer_json
from turnkeep.models.model_source import ModelFilesError

# End markers of GGUF vocabularies: end of sequence, of turn, of message.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
F32 = 0

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

    @cached_property
    def _architecture(self) -> GGUFArchitecture:
        known = ARCHITECTURES | GATED_DELTA_ARCHITECTURES
        architecture = known.get(self._fields.architecture)
        if architecture is None:
            raise ModelFilesError(
                f"{self.path}: architecture {self._fields.architecture!r} is not supported "
                f"(supported: {', '.join(known)})"
            )
        return architecture

    @cached_property
    def _fields(self) -> GGUFFields:
        return GGUFFields(self.path, self.header, str(self.header.metadata.get("general.architecture")))

    def config_dict(self) -> dict[str, Any]:
        values = self._architecture.read(self._fields)
        divisors = self.header.tensors.get(ROPE_DIVISORS)
        if divisors is not None and "rope_parameters" in values:
            if divisors.type_id != F32:
                raise ModelFilesError(f"{self.path}: {ROPE_DIVISORS} must be float32")
            count = math.prod(divisors.shape)
            numbers = np.fromfile(self.path, dtype="<f4", count=count, offset=divisors.offset)
            values["rope_parameters"] |= {"rope_type": "divisors", "divisors": numbers.tolist()}
        return values | {
            "bos_token_id": self.header.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(self.eos_token_ids),
        }

    def tensor_names(self) -> dict[str, str]:
        """Hugging Face name -> name in the file, of every weight (what config_dict already holds is left out)."""
        architecture, num_blocks = self._architecture, num_own_blocks(self._fields)
        names = {}
        for name in self.header.tensors:
            block = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
            if name == ROPE_DIVISORS or (block and int(block[1]) >= num_blocks):
                continue  # the latter belong to a draft head
            rest = block[2] if block else name
            stem, _, suffix = rest.rpartition(".")
            if not block:
                names[f"{architecture.outer[stem]}.{suffix}" if stem in architecture.outer else name] = name
                continue
            own = architecture.whole.get(rest)
            if own is None and stem in architecture.block:
                own = f"{architecture.block[stem]}.{suffix}"
            names[f"{architecture.layers}{block[1]}.{own}" if own else name] = name
        return names

    def hf_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the tensor called `name` in the file has in a Hugging Face checkpoint."""
        shape = self.header.tensors[name].shape
        if name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
            return (math.prod(shape),)
        if name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")):
            return (shape[0], 1, shape[-1])
        if name.endswith(".ffn_gate_inp_shexp.weight"):
            return (1, math.prod(shape))
        return shape

    def head_order(self, name: str) -> tuple[int, npt.NDArray[np.int64]] | None:
        """The dimension of the tensor called `name` in the file along which its elements must be put in another order,
        and that order."""
        return value_head_order(self._fields, name) if self._architecture.has_tiled_value_heads else None

    def holds_negative_exp(self, name: str) -> bool:
        """Whether the tensor called `name` in the file is -exp of the one in a Hugging Face checkpoint."""
        return name.endswith(".ssm_a")

    def holds_plus_one(self, name: str) -> bool:
        """Whether the tensor called `name` in the file is the one of a Hugging Face checkpoint, plus one."""
        has_norms = self._architecture.has_norms_around_zero
        return has_norms and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")

    def interleaved_heads(self, name: str) -> int | None:
        """Heads of the tensor called `name` in the file if its rows pair rotated dimensions next to each other.

        llama.cpp rotates (2i, 2i + 1) in some families where Hugging Face rotates (i, i + D/2), and permutes q and k
        rows to suit.
        """
        if not self._architecture.has_side_by_side_pairs:
            return None
        if ".attn_q." in name:
            return head_counts(self._fields)[0]
        return head_counts(self._fields)[1] if ".attn_k." in name else None

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer_json(self) -> str:
        return self._tokenizer_text

    @cached_property
    def _tokenizer_text(self) -> str:
        # Kept: the merges of a large sentencepiece vocabulary take seconds to find.
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
