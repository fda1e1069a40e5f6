"""The grid on which states in 16 bits are written; torch-free, since pools are sized by it. See `grid_cells.py`."""

from __future__ import annotations

GRID = 32  # tokens
# State part -> the inputs that its tail keeps, in parts called by both names: "ssm_x", ...
TAIL_NAMES = {"ssm": ("x", "dt", "B"), "delta": ("k", "v", "g", "beta")}
