"""Limits of the draft trees, and what makes a set of them valid. What is drafted within them is up to each step."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_DRAFT_LEN = 7
DEFAULT_TREE_TOPK = 3
DEFAULT_MAX_NODES = 15  # filled in where no size is named: the step planner grants fewer when fewer pay


class SpeculationConfigError(ValueError):
    """Settings that contradict each other; the message names them and the numbers."""


@dataclass(slots=True, frozen=True)
class SpeculationConfig:
    """A draft has at most max_draft_len levels below its root, max_children a node, max_total_draft_tokens nodes."""

    max_draft_len: int = DEFAULT_MAX_DRAFT_LEN
    dynamic_tree_max_topk: int = DEFAULT_TREE_TOPK  # 1: linear drafts
    max_total_draft_tokens: int = DEFAULT_MAX_NODES

    def __post_init__(self) -> None:
        length, width, total = self.max_draft_len, self.dynamic_tree_max_topk, self.max_total_draft_tokens
        if length < 1:
            raise SpeculationConfigError(f"max_draft_len must be at least 1, not {length}")
        if width < 1:
            raise SpeculationConfigError(f"dynamic_tree_max_topk must be at least 1, not {width}")
        if not length <= total <= width * length:
            raise SpeculationConfigError(
                f"max_total_draft_tokens must lie between max_draft_len ({length}) and dynamic_tree_max_topk x "
                f"max_draft_len ({width * length}), not be {total}"
            )

    @property
    def max_step_width(self) -> int:
        """Tokens of one request in a step: the root and its nodes."""
        return 1 + self.max_total_draft_tokens


def resolve_speculation(
    max_draft_len: int | None = None,
    dynamic_tree_max_topk: int | None = None,
    max_total_draft_tokens: int | None = None,
    *,
    use_dynamic_tree: bool = True,
) -> tuple[SpeculationConfig, tuple[str, ...]]:
    """Limits from what was asked for, None meaning "choose", and a notice for each setting that has no effect or was
    filled in beside others. Raises SpeculationConfigError."""
    length = DEFAULT_MAX_DRAFT_LEN if max_draft_len is None else max_draft_len
    if not use_dynamic_tree:
        return _linear(length, dynamic_tree_max_topk, max_total_draft_tokens)
    width = DEFAULT_TREE_TOPK if dynamic_tree_max_topk is None else dynamic_tree_max_topk
    notices: list[str] = []
    total = max_total_draft_tokens
    if total is None:
        is_chosen = max_draft_len is not None or dynamic_tree_max_topk is not None
        total = width * length if is_chosen else DEFAULT_MAX_NODES
        if is_chosen:
            notices.append(f"max_total_draft_tokens is {total}: dynamic_tree_max_topk x max_draft_len")
    return SpeculationConfig(length, width, total), tuple(notices)


def _linear(
    length: int, dynamic_tree_max_topk: int | None, max_total_draft_tokens: int | None
) -> tuple[SpeculationConfig, tuple[str, ...]]:
    notices: list[str] = []
    if dynamic_tree_max_topk is not None:
        notices.append("dynamic_tree_max_topk has no effect without use_dynamic_tree")
    if max_total_draft_tokens not in (None, length):
        raise SpeculationConfigError(
            f"max_total_draft_tokens of a linear draft is max_draft_len ({length}), not {max_total_draft_tokens}"
        )
    return SpeculationConfig(length, 1, length), tuple(notices)
