"""What state rows in 16 bits hold beside the states: the inputs of the tokens since the last grid line. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnkeep.kernels.rounding_grid import GRID, TAIL_NAMES

if TYPE_CHECKING:
    from turnkeep.models.config import ModelConfig


def tail_parts(config: ModelConfig, input_dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, type) of each part of a layer's tail. What the convolution made has the type of the weights, what
    is computed in float32 keeps it: a cell that is computed again must see the very same inputs."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    part = ""
    if config.mamba2 is not None:
        mamba2, part = config.mamba2, "ssm"
        shapes = {
            "x": ((mamba2.num_heads, mamba2.head_dim), input_dtype),
            "dt": ((mamba2.num_heads,), "float32"),
            "B": ((mamba2.num_groups, mamba2.state_size), input_dtype),
        }
    elif config.gated_delta is not None:
        delta, part = config.gated_delta, "delta"
        shapes = {
            "k": ((delta.num_key_heads, delta.key_dim), input_dtype),
            "v": ((delta.num_value_heads, delta.value_dim), input_dtype),
            "g": ((delta.num_value_heads,), "float32"),
            "beta": ((delta.num_value_heads,), "float32"),
        }
    return [(f"{part}_{name}", (GRID, *shapes[name][0]), shapes[name][1]) for name in TAIL_NAMES.get(part, ())]
