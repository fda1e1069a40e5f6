"""A simulated order desk: the tools that the demo agent calls, their schemas and the default system prompt.

Deterministic for a seed and stateful: created, changed and shipped orders stay so. Pure Python; knows nothing
about conversations, tokens or models.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from turnkeep.models.demo.words import CITIES, DAYS, ITEMS, NAMES, ORDER_LETTERS, STATUSES

SYSTEM_PROMPT = "You are the order desk agent. Remember what the user tells you. Use the tools."

NUM_INITIAL_ORDERS = 9

_EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*([-+*/])\s*(-?\d{1,9})\s*")


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }


TOOLS: list[dict[str, Any]] = [
    _tool("get_order", "look up an order", order="string"),
    _tool("get_price", "price of an item", item="string"),
    _tool("get_stock", "stock of an item", item="string"),
    _tool("calculate", "compute two numbers", expression="string"),
    _tool("create_order", "create an order", customer="string", item="string", quantity="integer"),
    _tool("set_quantity", "change an order", order="string", quantity="integer"),
    _tool("set_day", "set the delivery day", order="string", day="string"),
    _tool("ship_order", "ship an order", order="string", city="string"),
    _tool("cancel_order", "cancel an order", order="string"),
]


class OrderDesk:
    """Orders, prices and stock of one shop.

    The content depends on `seed` alone; calls change it. `orders` maps an order number ("B47") to its record,
    `prices` and `stock` map an item to euros and pieces.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"order-desk-{seed}")
        self.prices: dict[str, int] = {item: rng.randint(2, 99) for item in ITEMS}
        self.stock: dict[str, int] = {item: rng.randint(0, 60) for item in ITEMS}
        letters = list(ORDER_LETTERS)
        rng.shuffle(letters)
        self._free_ids = [f"{letter}{rng.randint(10, 99)}" for letter in letters]
        self.orders: dict[str, dict[str, Any]] = {}
        for _ in range(NUM_INITIAL_ORDERS):
            self._add(rng.choice(NAMES), rng.choice(ITEMS), rng.randint(2, 40), rng.choice(STATUSES))

    @property
    def num_free_orders(self) -> int:
        """How many orders can still be created before the book is full."""
        return len(self._free_ids)

    def call(self, name: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Run one tool and return its result.

        `arguments` is a mapping or its JSON text. Never raises for what a model can get wrong: an unknown tool,
        bad JSON or bad values give `{"error": reason}`.
        """
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return {"error": "bad arguments"}
        schema = next((t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == name), None)
        if schema is None:
            return {"error": "unknown tool"}
        if not isinstance(arguments, Mapping) or set(arguments) != set(schema["required"]):
            return {"error": "bad arguments"}
        kinds: dict[str, type] = {"string": str, "integer": int}
        for key, spec in schema["properties"].items():
            if not isinstance(arguments[key], kinds[spec["type"]]) or isinstance(arguments[key], bool):
                return {"error": "bad arguments"}
        result: dict[str, Any] = getattr(self, f"_{name}")(**arguments)
        return result

    def call_json(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """Like `call`, as the JSON text that goes into a tool message."""
        return json.dumps(self.call(name, arguments), ensure_ascii=False)

    def _add(self, customer: str, item: str, quantity: int, status: str) -> str:
        order = self._free_ids.pop(0)
        self.orders[order] = {"item": item, "quantity": quantity, "customer": customer, "status": status}
        return order

    def _get_order(self, order: str) -> dict[str, Any]:
        return dict(self.orders[order]) if order in self.orders else {"error": "not found"}

    def _get_price(self, item: str) -> dict[str, Any]:
        return {"price": self.prices[item]} if item in self.prices else {"error": "not found"}

    def _get_stock(self, item: str) -> dict[str, Any]:
        return {"stock": self.stock[item]} if item in self.stock else {"error": "not found"}

    def _calculate(self, expression: str) -> dict[str, Any]:
        match = _EXPRESSION.fullmatch(expression)
        if match is None:
            return {"error": "bad expression"}
        left, operator, right = int(match[1]), match[2], int(match[3])
        if operator == "/":
            return {"result": left // right} if right else {"error": "division by zero"}
        return {"result": {"+": left + right, "-": left - right, "*": left * right}[operator]}

    def _create_order(self, customer: str, item: str, quantity: int) -> dict[str, Any]:
        if item not in self.prices:
            return {"error": "not found"}
        if quantity < 1:
            return {"error": "bad quantity"}
        if not self._free_ids:
            return {"error": "order book is full"}
        return {"order": self._add(customer, item, quantity, "open")}

    def _change(self, order: str, **changes: Any) -> dict[str, Any]:
        """Change an order that has not left the house."""
        record = self.orders.get(order)
        if record is None:
            return {"error": "not found"}
        if record["status"] in ("shipped", "cancelled"):
            return {"error": f"already {record['status']}"}
        record.update(changes)
        return {"done": order}

    def _set_quantity(self, order: str, quantity: int) -> dict[str, Any]:
        return self._change(order, quantity=quantity) if quantity > 0 else {"error": "bad quantity"}

    def _set_day(self, order: str, day: str) -> dict[str, Any]:
        return self._change(order, day=day) if day in DAYS else {"error": "bad day"}

    def _ship_order(self, order: str, city: str) -> dict[str, Any]:
        return self._change(order, status="shipped", city=city) if city in CITIES else {"error": "bad city"}

    def _cancel_order(self, order: str) -> dict[str, Any]:
        return self._change(order, status="cancelled")
