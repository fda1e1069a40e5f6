"""Makes a conversation fit by leaving messages out of its middle (truncation "auto").

What begins the conversation and what was said last stay. Pure, but for the count of tokens that is passed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from turnkeep.server.responses.item_messages import Message

CountTokens = Callable[[list[Message]], Awaitable[int]]


async def drop_middle(
    messages: Sequence[Message], count_tokens: CountTokens, max_prompt_tokens: int
) -> tuple[list[Message], int]:
    """The messages that fit and how many are left out; as many as can be left out when nothing fits.

    An answer goes with the results of its calls. How many units go is a power of two, so that turn after turn leaves
    out the same ones for a while and goes on hitting the cache.
    """
    units = _units(messages)
    head = next((index + 1 for index, unit in enumerate(units) if unit[0]["role"] == "user"), len(units))
    num_droppable = max(0, len(units) - 1 - head)
    num_dropped = 0
    kept = list(messages)
    while await count_tokens(kept) > max_prompt_tokens and num_dropped < num_droppable:
        num_dropped = min(max(1, 2 * num_dropped), num_droppable)
        kept = [message for unit in [*units[:head], *units[head + num_dropped :]] for message in unit]
    return kept, len(messages) - len(kept)


def _units(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages in groups that stay or go together."""
    units: list[list[Message]] = []
    for message in messages:
        if message["role"] == "tool" and units:
            units[-1].append(message)
        else:
            units.append([message])
    return units
