"""The Anthropic Messages API: POST /v1/messages and /v1/messages/count_tokens over the same walk of a turn.

shapes: the body, typed. conversion: the body as a chat request. answers: events and bodies. refusals: errors.
"""

from __future__ import annotations

from turnkeep.server.messages_api.endpoint import MessagesEndpoint
from turnkeep.server.messages_api.refusals import messages_envelope

__all__ = ["MessagesEndpoint", "messages_envelope"]
