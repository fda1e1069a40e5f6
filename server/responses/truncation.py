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

    An answer goes with the results of its calls. How many go is one of a few numbers, a quarter apart, so that turn
    after turn leaves out the same ones for a while and goes on hitting the cache.
    """
    if await count_tokens(list(messages)) <= max_prompt_tokens:
        return list(messages), 0
    units = _units(messages)
    head = next((index + 1 for index, unit in enumerate(units) if unit[0]["role"] == "user"), len(units))

    def without(num_units: int) -> list[Message]:
        return [message for unit in [*units[:head], *units[head + num_units :]] for message in unit]

    numbers = _numbers(max(0, len(units) - 1 - head))
    low, high = 0, len(numbers) - 1
    while low < high:
        middle = (low + high) // 2
        if await count_tokens(without(numbers[middle])) <= max_prompt_tokens:
            high = middle
        else:
            low = middle + 1
    kept = without(numbers[low])
    return kept, len(messages) - len(kept)


def _numbers(highest: int) -> list[int]:
    """1, 2, 3, 4, 5, 7, 9, 12, ... and at last the highest; only 0 when that is all there is."""
    numbers, number = [], 1
    while number < highest:
        numbers.append(number)
        number = max(number + 1, number * 5 // 4)
    return [*numbers, highest]


def _units(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages in groups that stay or go together."""
    units: list[list[Message]] = []
    for message in messages:
        if message["role"] == "tool" and units:
            units[-1].append(message)
        else:
            units.append([message])
    return units
