"""The simulated tools: results, changes that stay, and errors instead of exceptions."""

from __future__ import annotations

import json

import pytest

from turnkeep.models.demo.order_desk import OrderDesk


def test_the_desk_depends_on_its_seed_alone() -> None:
    assert OrderDesk(4).orders == OrderDesk(4).orders
    assert OrderDesk(4).orders != OrderDesk(5).orders


def test_created_and_changed_orders_stay() -> None:
    desk = OrderDesk(1)
    order = desk.call("create_order", {"customer": "Mara", "item": "lamps", "quantity": 6})["order"]
    assert desk.call("set_quantity", {"order": order, "quantity": 9}) == {"done": order}
    assert desk.call("get_order", {"order": order}) == {
        "item": "lamps", "quantity": 9, "customer": "Mara", "status": "open",
    }  # fmt: skip
    assert desk.call("ship_order", {"order": order, "city": "Oslo"}) == {"done": order}
    assert desk.call("cancel_order", {"order": order}) == {"error": "already shipped"}


@pytest.mark.parametrize(
    ("expression", "result"),
    [("12 * 4", 48), ("7 - 9", -2), ("3+4", 7), ("9 / 2", 4), ("-3 * 2", -6)],
)
def test_calculate(expression: str, result: int) -> None:
    assert OrderDesk(0).call("calculate", {"expression": expression}) == {"result": result}


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("no_such_tool", {}, "unknown tool"),
        ("get_order", {"order": "Q00"}, "not found"),
        ("get_order", {}, "bad arguments"),
        ("get_order", {"order": 5}, "bad arguments"),
        ("get_order", "{not json", "bad arguments"),
        ("get_order", "[1]", "bad arguments"),
        ("set_quantity", {"order": "Q00", "quantity": True}, "bad arguments"),
        ("calculate", {"expression": "__import__('os')"}, "bad expression"),
        ("calculate", {"expression": "1 / 0"}, "division by zero"),
        ("create_order", {"customer": "Mara", "item": "planets", "quantity": 1}, "not found"),
        ("create_order", {"customer": "Mara", "item": "lamps", "quantity": 0}, "bad quantity"),
    ],
)
def test_wrong_calls_give_an_error_result(name: str, arguments: dict[str, object] | str, error: str) -> None:
    assert OrderDesk(0).call(name, arguments) == {"error": error}


def test_a_full_order_book_is_an_error_and_not_an_exception() -> None:
    desk = OrderDesk(0)
    arguments = {"customer": "Mara", "item": "lamps", "quantity": 1}
    results = [desk.call("create_order", arguments) for _ in range(desk.num_free_orders + 1)]
    assert results[-1] == {"error": "order book is full"}
    assert len({result["order"] for result in results[:-1]}) == len(results) - 1


def test_call_json_takes_and_gives_json_text() -> None:
    result = OrderDesk(0).call_json("calculate", json.dumps({"expression": "2 + 2"}))
    assert result == '{"result": 4}'
