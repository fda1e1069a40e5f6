"""The options that say who drafts tokens ahead, and how many."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from turnkeep.engine.config import SpeculationMode

_SETTINGS = ("speculation", "max_draft_len", "dynamic_tree_max_topk", "max_total_draft_tokens")


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """Those that were not given stay None, but for --speculation."""
    group = parser.add_argument_group("speculation", "tokens drafted ahead and verified together; it changes no token")
    group.add_argument(
        "--speculation",
        choices=get_args(SpeculationMode),
        default="auto",
        help="mtp: with the model's own draft head; auto: with it where the model has one; ngram: copies of what the "
        "prompt and the answer so far say; off (default: auto)",
    )
    group.add_argument("--max-draft-len", type=int, metavar="N", help="levels of a draft tree")
    group.add_argument(
        "--dynamic-tree-max-topk", type=int, metavar="N", help="drafted tokens that may follow one (1: linear drafts)"
    )
    group.add_argument(
        "--max-total-draft-tokens", type=int, metavar="N", help="drafted tokens of one request in a step"
    )


def draft_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig."""
    return {name: getattr(options, name) for name in _SETTINGS}
