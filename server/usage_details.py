"""What the usage of every API shape says beyond the counts that its clients know: fields of ours, where there is
something to tell. Knows no shape: each puts them where it details its own counts.
"""

from __future__ import annotations

from typing import Any

from turnkeep.server.turn_events import ChoiceEnded, Usage


def loss_details(counted: ChoiceEnded | Usage) -> dict[str, Any]:
    """Where prompt tokens were computed again, lost_tokens says how many and why."""
    return {"lost_tokens": dict(counted.lost_tokens)} if counted.lost_tokens else {}


def draft_details(counted: ChoiceEnded | Usage) -> dict[str, Any]:
    """Where output tokens were drafted: OpenAI's words for predictions, as drafts are some, and accepted_by_depth, how
    many were right of those one token ahead, two, and so on."""
    if not counted.num_drafted_tokens:
        return {}
    num_accepted = sum(counted.accepted_by_depth)
    return {
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": counted.num_drafted_tokens - num_accepted,
        "accepted_by_depth": list(counted.accepted_by_depth),
    }
