"""Quantised GGUF tensors of the kinds that published files mix, against definitions of their blocks written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turnkeep.models.catalog import find_model
from turnkeep.models.checkpoint_files import GGUFTensors
from turnkeep.models.gguf_source import GGUFSource

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

Array = np.ndarray[Any, Any]
ROWS, COLUMNS = 6, 512
NAME = "blk.0.ffn_up.weight"
# kind -> bytes of a block of 256, and where its float16 scales lie
K_BLOCKS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}


def random_blocks(kind: str) -> Array:
    """Blocks of random bits with small scales: [ROWS, COLUMNS / 256, bytes]."""
    num_bytes, scales = K_BLOCKS[kind]
    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 256, (ROWS, COLUMNS // 256, num_bytes), dtype=np.uint8)
    for offset in scales:
        values = generator.uniform(0.001, 0.01, (ROWS, COLUMNS // 256, 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = values.view(np.uint8)
    return blocks


def half(block: Array, offset: int) -> float:
    return float(block[offset : offset + 2].view(np.float16)[0])


def six_bit_scales(packed: Array) -> tuple[list[int], list[int]]:
    """Scales and minima of the eight groups of 32, packed in twelve bytes."""
    scales, minima = [], []
    for j in range(8):
        if j < 4:
            scales.append(packed[j] & 63)
            minima.append(packed[j + 4] & 63)
        else:
            scales.append((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4)
            minima.append((packed[j + 4] >> 4) | (packed[j] >> 6) << 4)
    return [int(value) for value in scales], [int(value) for value in minima]


def slow_q4_or_q5(block: Array, has_fifth_bit: bool) -> list[float]:
    """Groups 2i and 2i + 1 are the low and high halves of the same 32 bytes."""
    scales, minima = six_bit_scales(block[4:16])
    quants = block[48:] if has_fifth_bit else block[16:]
    values = []
    for group in range(8):
        for i in range(32):
            nibble = int(quants[group // 2 * 32 + i]) >> (4 * (group % 2)) & 15
            fifth = (int(block[16 + i]) >> group & 1) << 4 if has_fifth_bit else 0
            values.append(half(block, 0) * scales[group] * (nibble | fifth) - half(block, 2) * minima[group])
    return values


def slow_q6(block: Array) -> list[float]:
    """Low four bits in 128 bytes, high two bits in 64, sixteen signed scales."""
    scales = block[192:208].view(np.int8)
    values = [0.0] * 256
    for n in range(256):
        part, rest = divmod(n, 128)
        quarter, i = divmod(rest, 32)
        low = int(block[64 * part + 32 * (quarter % 2) + i]) >> (4 * (quarter // 2)) & 15
        high = int(block[128 + 32 * part + i]) >> (2 * quarter) & 3
        values[n] = half(block, 208) * int(scales[n // 16]) * ((low | high << 4) - 32)
    return values


def stored(path: Path, data: Array, kind: str) -> torch.Tensor:
    """The tensor as it is read back from a file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor(NAME, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = find_model(str(path))
    assert isinstance(source, GGUFSource)
    tensors = GGUFTensors(source)
    assert tensors.shapes() == {"model.layers.0.mlp.up_proj.weight": (ROWS, COLUMNS)}
    return tensors.read("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("kind", K_BLOCKS)
def test_k_quants_are_read_as_they_are_defined(tmp_path: Path, kind: str) -> None:
    blocks = random_blocks(kind)
    slow = slow_q6 if kind == "Q6_K" else lambda block: slow_q4_or_q5(block, kind == "Q5_K")
    expected = np.array([[slow(block) for block in row] for row in blocks]).reshape(ROWS, COLUMNS)
    ours = stored(tmp_path / "model.gguf", blocks.reshape(ROWS, -1), kind)
    torch.testing.assert_close(ours, torch.from_numpy(expected).float(), atol=1e-6, rtol=1e-5)
    assert ours.std() > 0.01


@pytest.mark.parametrize(("kind", "error"), [("Q5_0", 0.08), ("Q5_1", 0.05), ("Q8_0", 0.01)])
def test_five_bits_come_back_within_their_step(tmp_path: Path, kind: str, error: float) -> None:
    data = np.random.default_rng(2).uniform(-1, 1, (ROWS, COLUMNS)).astype(np.float32)
    quantised = gguf.quantize(data, gguf.GGMLQuantizationType[kind])
    ours = stored(tmp_path / "model.gguf", quantised, kind)
    assert 0 < (ours - torch.from_numpy(data)).abs().max() < error
