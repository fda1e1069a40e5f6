"""Typed access to the metadata and the tensor table of one GGUF file. Torch-free; knows no architecture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnkeep.models.gguf_metadata import GGUFHeader
from turnkeep.models.model_source import ModelFilesError


@dataclass(frozen=True, slots=True)
class GGUFFields:
    """The metadata of one file under the keys of its architecture. Every error names the file and the key."""

    path: Path
    header: GGUFHeader
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def value(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelFilesError(f"{self.path}: metadata {self.architecture}.{key} is missing")
        return value

    def integer(self, key: str) -> int:
        value = self.value(key)
        if not isinstance(value, int):
            raise ModelFilesError(f"{self.path}: {key} must be one integer for all blocks, not {value!r}")
        return value

    def by_block(self, key: str, num_blocks: int) -> list[int]:
        """A value of each block, also where the file has one for all of them."""
        value = self.value(key)
        values = value if isinstance(value, list) else [value] * num_blocks
        if len(values) < num_blocks or not all(isinstance(one, int) for one in values):
            raise ModelFilesError(f"{self.path}: {key} must be integers of {num_blocks} blocks, not {value!r}")
        return values[:num_blocks]

    def decimal(self, key: str) -> float:
        # A float32 in the file: 1e-5 would read 9.99999974e-06, and the model was trained with the decimal.
        return float(f"{self.value(key):.6g}")

    def rows(self, tensor: str) -> int:
        """The first dimension of a tensor."""
        found = self.header.tensors.get(tensor)
        if found is None:
            raise ModelFilesError(f"{self.path}: tensor {tensor} is missing")
        return found.shape[-2] if len(found.shape) > 1 else found.shape[0]

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def any_block_has(self, name: str) -> bool:
        """Whether some block has the tensor called `name`, suffix included."""
        return any(stored.endswith(f".{name}") for stored in self.header.tensors)

    def refuse(self, reason: str) -> ModelFilesError:
        return ModelFilesError(f"{self.path}: {reason}")


def head_counts(fields: GGUFFields) -> tuple[int, int]:
    """Query heads, and the key-value heads of the blocks that have any."""
    num_heads = fields.value("attention.head_count")
    if isinstance(num_heads, list):
        raise fields.refuse(f"attention.head_count must be one integer for all blocks, not {num_heads!r}")
    counts = fields.get("attention.head_count_kv", num_heads)
    distinct = {count for count in counts if count} if isinstance(counts, list) else {counts}
    if len(distinct) > 1:
        raise fields.refuse(f"attention.head_count_kv must be one integer for all blocks, not {counts!r}")
    return num_heads, next(iter(distinct), num_heads)


def num_own_blocks(fields: GGUFFields) -> int:
    """Blocks of the model itself: those of a draft head stand behind them."""
    return fields.integer("block_count") - int(fields.get("nextn_predict_layers", 0))
