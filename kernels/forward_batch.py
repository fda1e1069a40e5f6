"""The tensors of one engine step: what a model is given besides its weights.

Letters: T tokens of the step, R requests of the step, K rows whose logits are wanted, P pages of the pool, S state
rows of the pool, La / Lr attention and recurrent layers, Hkv key-value heads, D head dimension. Requests are packed
one after another; the first `num_decodes` of them have exactly one token and some context (the decode fast path), the
next ones are draft trees, whose tokens are their nodes.
Nothing here knows a request, an owner of a page, or a conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.replay_history import HistorySpans, TreeTerms


class StateExport(NamedTuple):
    """Write the recurrent state after `length` tokens of packed sequence `sequence` into state row `row`.

    `length` counts tokens of this step's chunk, 1 <= length <= chunk length. Exports never cut the chunk.
    """

    sequence: int
    length: int
    row: int


@dataclass(slots=True, frozen=True)
class TreeBatch:
    """The requests of a step that verify a tree. A forward pass writes nothing for them, it leaves `terms`."""

    trees: DraftTrees
    history: HistorySpans | None  # what their state rows do not contain yet; None without recurrent layers
    terms: TreeTerms


@dataclass(slots=True, frozen=True)
class ForwardBatch:
    """One packed step."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, absolute
    seq_lens: tuple[int, ...]  # [R] tokens of each request in this step, >= 1
    context_lens: tuple[int, ...]  # [R] tokens computed before this step; 0 means: start from a zero state
    num_decodes: int  # leading requests with seq_len 1 and context_len > 0
    cu_seqlens: torch.Tensor  # [R + 1] int64, starts of each request's tokens
    kv_lens: torch.Tensor  # [R] int64, context_lens + seq_lens
    page_table: torch.Tensor  # [R, max_pages] int64; padded with page 0, which is never allocated
    slot_mapping: torch.Tensor  # [T] int64, page_id * page_size + offset where a token's KV is written; 0 for nodes
    state_rows: torch.Tensor | None  # [R] int64, live rows read and written in place; None without recurrent layers
    exports: tuple[StateExport, ...]
    logit_indices: torch.Tensor  # [K] int64, rows of T whose logits are wanted
    trees: TreeBatch | None = None  # the requests after the decodes

    @property
    def num_trees(self) -> int:
        return 0 if self.trees is None else self.trees.trees.num_trees

    @property
    def num_tree_nodes(self) -> int:
        return 0 if self.trees is None else len(self.trees.trees.parents)


@dataclass(slots=True, frozen=True)
class CacheTensors:
    """The pools a model reads and writes in place.

    kv: one tensor [2, P, page_size, Hkv, D] an attention layer (0 keys, 1 values), in layer order.
    states: name of a state part ("conv", "ssm", ...) -> one tensor [S, ...] a recurrent layer, in layer order.
    conv is [S, conv_dim, conv_width - 1], oldest input first; ssm is [S, H, headdim, dstate], delta is [S, value heads,
    key dim, value dim].
    histories: name of a history part -> one tensor a recurrent layer, see replay_history.py; empty without drafts.
    Row 0 and page 0 are reserved as padding and hold finite values.
    """

    kv: list[torch.Tensor]
    states: dict[str, list[torch.Tensor]]
    histories: dict[str, list[torch.Tensor]] = field(default_factory=dict)
