"""Lists of items a page at a time, as the Responses and the Conversations API give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnkeep.server import errors
from turnkeep.server.stores import Item

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


def item_page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """limit (1 to 100), order (desc: newest first), after (the id of the last item of the page before).

    items: oldest first, all of them. Raises ApiError 400.
    """
    text = query.get("limit", str(DEFAULT_LIMIT))
    limit = int(text) if text.isdecimal() and len(text) <= 3 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise errors.bad_request(f"limit must be from 1 to {MAX_LIMIT}.", "limit")
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise errors.bad_request("order must be 'asc' or 'desc'.", "order")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    start = 0
    if after is not None:
        position = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if position is None:
            raise errors.bad_request("after must be the id of an item of this list.", "after")
        start = position + 1
    page = ordered[start : start + limit]
    return item_list(page, has_more=start + limit < len(ordered))


def item_list(items: Sequence[Item], *, has_more: bool = False) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
