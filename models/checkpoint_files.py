"""Tensors of a checkpoint by their Hugging Face names, whatever file they lie in: safetensors or GGUF.

Gives shapes without reading data, and one tensor at a time. Pickled weights are refused. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from turnkeep.models.gguf_metadata import GGUFTensor
from turnkeep.models.gguf_source import GGUFSource
from turnkeep.models.hf_folder import INDEX_FILE, SINGLE_FILE
from turnkeep.models.model_source import ModelSource

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Narrower types need scales that this reader does not know.
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


class WeightsError(ValueError):
    """Weights are missing, unreadable, or do not fit the config. The lists name tensors of the checkpoint."""

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        misshapen: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.misshapen = misshapen


class Checkpoint(Protocol):
    """Named tensors."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor called `name`, on the CPU, in a floating point type. Raises WeightsError."""


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """The weights of a model. Raises WeightsError for files that cannot be read."""
    return GGUFTensors(source) if isinstance(source, GGUFSource) else SafetensorsFolder(source.path)


class TensorsInMemory:
    """A checkpoint that is a dict already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class SafetensorsFolder:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        self.file_of: dict[str, Any] = {}
        for file_name in self._file_names():
            path = folder / file_name
            if not path.is_file():
                raise WeightsError(f"{path} is missing: {INDEX_FILE} names it")
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} cannot be read as safetensors: {error}") from error
            self.file_of |= dict.fromkeys(file.keys(), file)

    def _file_names(self) -> list[str]:
        if (self.folder / SINGLE_FILE).is_file():
            return [SINGLE_FILE]
        index = self.folder / INDEX_FILE
        if index.is_file():
            with suppress(ValueError, KeyError, AttributeError, TypeError):
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
                if all(Path(name).name == name for name in names):
                    return names
            raise WeightsError(f"{index} is not an index of safetensors files in its folder")
        pickled = sorted(path.name for pattern in PICKLED for path in self.folder.glob(pattern))
        if pickled:
            raise WeightsError(
                f"{self.folder} has only pickled weights ({', '.join(pickled)}). They are refused, because opening "
                "them can run any code they carry: convert them to safetensors first"
            )
        raise WeightsError(f"{self.folder} has no weights (looked for {SINGLE_FILE} and {INDEX_FILE})")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self.file_of.items()}

    def read(self, name: str) -> torch.Tensor:
        file = self.file_of[name]
        dtype = file.get_slice(name).get_dtype()
        if dtype not in READABLE_DTYPES:
            raise WeightsError(f"tensor {name} is stored as {dtype}; quantised checkpoints are not supported")
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


class GGUFTensors:
    """The tensors of a GGUF file, dequantised to float32, in Hugging Face's order of rows and shapes."""

    def __init__(self, source: GGUFSource) -> None:
        try:
            import gguf
        except ImportError as error:
            raise WeightsError("reading GGUF weights needs the package gguf: pip install 'turnkeep[gguf]'") from error
        self.gguf = gguf
        self.source = source
        self.names = source.tensor_names()
        self.data = np.memmap(source.path, dtype=np.uint8, mode="r")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.source.hf_shape(stored) for name, stored in self.names.items()}

    def read(self, name: str) -> torch.Tensor:
        stored = self.names[name]
        values = self._dequantise(self.source.header.tensors[stored])
        num_heads = self.source.interleaved_heads(stored)
        if num_heads is not None:
            # Stored rows of a head alternate between its halves: (i, i + D/2) lie next to each other.
            pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [H, D / 2, 2, ...]
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        order = self.source.head_order(stored)
        if order is not None:
            values = values.take(order[1], axis=order[0])
        if self.source.holds_negative_exp(stored):
            values = np.log(-values)
        if self.source.holds_plus_one(stored):
            values = values - 1.0
        values = values.reshape(self.source.hf_shape(stored))
        # Unquantised tensors still lie in the file's read-only map.
        return torch.from_numpy(np.ascontiguousarray(values) if values.flags.writeable else values.copy())

    def _dequantise(self, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        try:
            kind = self.gguf.GGMLQuantizationType(tensor.type_id)
            elements_per_block, block_bytes = self.gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise WeightsError(f"tensor {tensor.name} has the unknown GGML type {tensor.type_id}") from None
        num_bytes = tensor.num_elements // elements_per_block * block_bytes
        if tensor.offset + num_bytes > len(self.data):
            raise WeightsError(f"{self.source.path} is cut short: tensor {tensor.name} runs past its end")
        row_bytes = tensor.shape[-1] // elements_per_block * block_bytes
        raw = self.data[tensor.offset : tensor.offset + num_bytes].reshape(-1, row_bytes)
        try:
            values = self.gguf.dequantize(raw, kind)
        except NotImplementedError as error:
            raise WeightsError(f"tensor {tensor.name}: GGML type {kind.name} cannot be dequantised") from error
        return np.asarray(values, dtype=np.float32).reshape(tensor.shape)
