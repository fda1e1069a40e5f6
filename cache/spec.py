"""Shapes and sizes of what the cache stores: attention pages and recurrent state rows. No tensors, no ids."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Attention keys and values: [2, page_size, num_kv_heads, head_dim] a page and layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StatePart:
    """One named tensor of a recurrent layer's state, `shape` without the row dimension."""

    name: str
    num_layers: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.num_layers * prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """All recurrent layers of one position: what one state row holds."""

    parts: tuple[StatePart, ...]

    @property
    def bytes_per_row(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class HistorySpec:
    """What a history slot keeps of `capacity` accepted tokens, in all layers with a state."""

    capacity: int
    parts: tuple[StatePart, ...]

    @property
    def bytes_per_slot(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What the pools are made of. `kv` is None for attention-free models, `state` for models without recurrence,
    `history` where no drafts are verified or there is no state."""

    page_size: int
    kv: KVSpec | None
    state: StateSpec | None
    history: HistorySpec | None = None

    def check_pools(self, num_pages: int, num_state_rows: int) -> None:
        """Raises ValueError for pools in which nothing could ever run."""
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {self.page_size}")
        if self.kv is not None and num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is reserved), not {num_pages}")
        if self.state is not None and num_state_rows < 2:
            raise ValueError(f"num_state_rows must be at least 2 (row 0 is reserved), not {num_state_rows}")

    @property
    def bytes_per_page(self) -> int:
        return self.page_size * self.kv.bytes_per_token if self.kv else 0

    @property
    def bytes_per_row(self) -> int:
        return self.state.bytes_per_row if self.state else 0

    @property
    def bytes_per_history_slot(self) -> int:
        return self.history.bytes_per_slot if self.history else 0
