"""The cache report of a conversation: for every turn, which prompt tokens were reused and why the others were not."""

from __future__ import annotations

from typing import Any

from turnkeep.server.conversations import Conversation, TurnRecord

# Of prompt tokens: what they are in the engine (cache/loss_reason.py), and what only the server can tell.
LOSS_REASONS = ("evicted", "no_snapshot", "capacity", "tier", "salt")


def cache_report(conversation: Conversation) -> dict[str, Any]:
    """Body of GET /v1/conversations/{id}/cache, for a conversation that may still run."""
    totals = conversation.totals
    num_prompt = totals["prompt_tokens"]
    return {
        "object": "conversation.cache",
        "conversation_id": conversation.conversation_id,
        "started_at": conversation.started_s,
        "last_used_at": conversation.last_used_s,
        "num_turns": conversation.num_turns,
        "num_branches": conversation.num_branches,
        "totals": {
            "prompt_tokens": num_prompt,
            "cached_tokens": totals["cached_tokens"],
            "recomputed_tokens": num_prompt - totals["cached_tokens"],
            "new_tokens": totals["new_tokens"],
            "output_tokens": totals["output_tokens"],
            "cached_share": totals["cached_tokens"] / num_prompt if num_prompt else 0.0,
            "lost": {
                "template": totals["lost_template"],
                **{reason: totals[f"lost_{reason}"] for reason in LOSS_REASONS},
            },
        },
        "turns": [turn_report(record) for record in conversation.turns],
    }


def turn_report(record: TurnRecord) -> dict[str, Any]:
    """One turn. lost.template counts tokens the engine holds and the prompt does not repeat; the others are prompt
    tokens that had been computed before and are computed again. From token first_difference on, which belongs to
    message first_different_message of the request, the prompt reads otherwise than what the engine holds."""
    return {
        "request_id": record.request_id,
        "ended_at": record.ended_s,
        "branch": record.branch,
        "prompt_tokens": record.num_prompt_tokens,
        "matched_tokens": record.num_matched_tokens,
        "cached_tokens": record.num_cached_tokens,
        "recomputed_tokens": record.num_prompt_tokens - record.num_cached_tokens,
        "new_tokens": record.num_new_tokens,
        "output_tokens": record.num_output_tokens,
        "held_tokens": record.num_held_tokens,
        "lost": {
            "template": record.num_lost_template,
            **{reason: record.lost_tokens.get(reason, 0) for reason in LOSS_REASONS},
        },
        "first_difference": record.first_difference,
        "first_different_message": record.first_different_message,
        "finish_reason": record.finish_reason,
        "stable_tokens": record.stable_tokens,
        "ttft_s": record.ttft_s,
    }
