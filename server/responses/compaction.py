"""POST /v1/responses/compact: a conversation made short by the model itself.

The output takes the place of the conversation in the next request. What was said is then gone from the prompt, so a
compaction is a break of its prefix that the client has decided on.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from turnkeep.server import errors
from turnkeep.server.responses.answers import usage_dict
from turnkeep.server.responses.chat_body import response_params
from turnkeep.server.responses.item_messages import make_encrypted
from turnkeep.server.responses.service import ResponsesService
from turnkeep.server.responses.shapes import CompactRequest, ResponsesRequest
from turnkeep.server.turn_events import ChoiceEnded, TurnDelta

MAX_SUMMARY_TOKENS = 2048

TASK = (
    "Write a summary of this conversation from which it can be continued without its text: what the user wants, what "
    "was found out, what was done, what is still to do, and every name, number and identifier that may be needed. "
    "Write the summary only."
)
HEADING = "Summary of the conversation so far:\n\n"


async def compact(
    service: ResponsesService, body: CompactRequest, headers: Mapping[str, str], tenant: str, arrival_s: float
) -> dict[str, Any]:
    """The compacted conversation: its system and developer messages as they are, and the rest as one sealed item.

    Raises ApiError.
    """
    request = ResponsesRequest(
        model=body.model,
        input=body.input,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        cache_salt=body.cache_salt,
        max_output_tokens=MAX_SUMMARY_TOKENS,
        store=False,
        truncation="auto",
    )
    plan = await service.plan(request, headers, tenant)
    plan.messages.append({"role": "user", "content": TASK})
    texts: list[str] = []
    usage: dict[str, Any] = {}
    with response_params():
        turn = await service.start_turn(plan, headers, arrival_s)
        async with turn:
            while not turn.is_complete:
                for event in await turn.next_events(None):
                    if isinstance(event, TurnDelta):
                        texts.append(event.content)
                    elif isinstance(event, ChoiceEnded):
                        usage = usage_dict(event)
    summary = "".join(texts).strip()
    if not summary:
        raise errors.ApiError(500, "The model wrote no summary.", kind="server_error", code="server_error")
    kept = [item for item in (*plan.history, *plan.input_items) if item.get("role") in ("system", "developer")]
    sealed = {
        "type": "compaction",
        "id": f"cmp_{secrets.token_hex(16)}",
        "encrypted_content": make_encrypted(HEADING + summary),
    }
    return {
        "id": plan.id,
        "object": "response.compaction",
        "created_at": int(service.clock()),
        "output": [*kept, sealed],
        "usage": usage,
    }
