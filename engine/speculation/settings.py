"""Which drafts an engine makes: from its settings and from what the model brings. Torch-free, so that pools can be
sized before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turnkeep.engine.config import EngineConfig
from turnkeep.models.config import ModelConfig
from turnkeep.models.draft_heads.presence import why_no_draft_head
from turnkeep.models.model_source import ModelSource
from turnkeep.scheduler.drafts import TreeGrant
from turnkeep.scheduler.speculation_config import SpeculationConfig, resolve_speculation

# Rows are written once in so many accepted tokens, which is within 4 % of the least traffic for all state sizes.
HISTORY_CAPACITY = 32


@dataclass(slots=True, frozen=True)
class Speculation:
    """drafter None: nothing is drafted; "tokens": by something that looks at tokens alone. limits: of each tree."""

    drafter: Literal["mtp", "tokens"] | None
    limits: SpeculationConfig
    notices: tuple[str, ...] = ()

    @property
    def has_draft_head(self) -> bool:
        return self.drafter == "mtp"

    @property
    def history_capacity(self) -> int:
        """Tokens of a replay history; the longest path of a step must fit."""
        return 0 if self.drafter is None else max(HISTORY_CAPACITY, self.limits.max_draft_len + 1)

    def grant(self, max_running: int) -> TreeGrant | None:
        """The most that may be proposed for one step."""
        limits = self.limits
        if self.drafter is None:
            return None
        return TreeGrant(
            num_nodes=limits.max_total_draft_tokens * max_running,
            max_nodes_per_request=limits.max_total_draft_tokens,
            max_depth=limits.max_draft_len,
            max_children=limits.dynamic_tree_max_topk,
        )


NO_SPECULATION = Speculation(None, SpeculationConfig())


def resolve_drafts(config: EngineConfig, source: ModelSource, model_config: ModelConfig) -> Speculation:
    """Who drafts. Raises SpeculationConfigError for limits that contradict each other, ValueError for a draft head that
    was asked for and is not there, or cannot be used."""
    limits, notices = resolve_speculation(
        config.max_draft_len, config.dynamic_tree_max_topk, config.max_total_draft_tokens
    )
    if config.speculation == "off":
        return NO_SPECULATION
    drafter: Literal["mtp", "tokens"] = "tokens" if config.speculation == "ngram" else "mtp"
    reason = why_no_draft_head(source, model_config) if drafter == "mtp" else None
    if reason is None and config.state_dtype != "float32":
        reason = f"drafts are verified on states in float32, these are in {config.state_dtype}"
        if config.speculation == "auto":
            return Speculation(None, SpeculationConfig(), (f"speculation is off: {reason}",))
    if reason is None:
        return Speculation(drafter, limits, notices)
    if config.speculation != "auto":
        raise ValueError(f"speculation {config.speculation}: {reason}")
    return NO_SPECULATION
