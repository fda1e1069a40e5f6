"""Writes seeded order-desk conversations, with what is expected of every turn.

One writer plays user, agent and desk at once. It is the source of the training text, of the evaluation and of
the scripted user of `turnkeep demo`. Pure Python; knows nothing about templates, tokens or models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turnkeep.models.demo import words
from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, TOOLS, OrderDesk
from turnkeep.models.demo.script import Conversation, ToolCall, Turn
from turnkeep.models.demo.words import ATTRIBUTES, Attribute

MAX_FACTS = 26


@dataclass
class _Fact:
    attribute: Attribute
    who: str
    value: str
    told: int
    mentioned: int

    @property
    def statement(self) -> str:
        return self.attribute.statement.format(who=self.who, value=self.value)


class ConversationWriter:
    """Writes one conversation turn by turn.

    `with_tools=False` gives an agent that must say it has none. `memory_share` is the share of turns that are made
    to be about facts, on top of those that are anyway.
    """

    def __init__(
        self,
        seed: int,
        *,
        with_tools: bool = True,
        system: str | None = SYSTEM_PROMPT,
        memory_share: float = 0.0,
    ) -> None:
        self.seed = seed
        self.system = system
        self.tools = TOOLS if with_tools else None
        self.desk = OrderDesk(seed)
        self._rng = random.Random(f"conversation-{seed}")
        self._memory_share = memory_share
        self._facts: list[_Fact] = []
        self._num_turns = 0
        self._num_calls = 0
        self._customers = self._rng.sample(words.NAMES, 8)
        self._items = self._rng.sample(words.ITEMS, 8)
        self._known_orders = list(self.desk.orders)
        self._turn = Turn(0, "", "")

    # -- one turn -------------------------------------------------------------------------------------------

    def next_turn(self) -> Turn:
        """Write the next turn; the desk changes with it."""
        self._turn = Turn(self._num_turns, "", "")
        kind = self._choose_kind()
        self._turn.kind = kind
        self._writers()[kind]()
        self._num_turns += 1
        return self._turn

    def _writers(self) -> dict[str, Callable[[], None]]:
        return {
            "tell": self._tell, "recall": self._recall, "recall_unknown": self._recall_unknown,
            "small_talk": self._small_talk, "status": self._status, "content": self._content, "price": self._price,
            "stock": self._stock, "total": self._total, "quote": self._quote, "together": self._together,
            "enough": self._enough, "create": self._create, "change": self._change, "cancel": self._cancel,
            "ship": self._ship, "day": self._day, "arithmetic": self._arithmetic,
        }  # fmt: skip

    def _choose_kind(self) -> str:
        rng, num_facts = self._rng, len(self._facts)
        if self._num_turns == 0 and rng.random() < 0.25:
            return "small_talk"
        if self._memory_share and rng.random() < self._memory_share:
            return self._choose_memory_kind()
        draw = rng.random()
        if num_facts < 5 and draw < 0.65:
            return "tell"
        if draw < 0.16:
            return "tell" if num_facts < MAX_FACTS else "recall"
        if draw < 0.48:
            return "recall" if num_facts else "tell"
        if draw < 0.51:
            return "recall_unknown"
        if draw < 0.54:
            return "small_talk"
        kinds = ["status", "content", "price", "stock", "total", "quote", "together", "enough", "change", "cancel",
                 "ship", "ship", "day", "day", "arithmetic"]  # fmt: skip
        if self.desk.num_free_orders:
            kinds += ["create", "create"]
        return rng.choice(kinds)

    def _choose_memory_kind(self) -> str:
        num_facts, draw = len(self._facts), self._rng.random()
        if num_facts == 0 or draw < (0.6 if num_facts < 14 else 0.2 if num_facts < 40 else 0.0):
            return "tell"
        return "recall_unknown" if draw > 0.92 else "recall"

    def _say(self, *phrasings: str, prefixes: tuple[str, ...] = ("", "", "", "", "Please: ")) -> None:
        self._turn.user = self._rng.choice(prefixes) + self._rng.choice(phrasings)

    def _call(self, reasoning: str, *calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]] | None:
        """One assistant message with tool calls, and their results; None (and an answer) without tools."""
        if self.tools is None:
            if not self._turn.messages:
                self._answer(words.NO_TOOLS_REASONING, words.NO_TOOLS_ANSWER)
            return None
        tool_calls, results, tool_messages = [], [], []
        for name, arguments in calls:
            self._num_calls += 1
            call_id = f"call_{self._num_calls}"
            self._turn.expected_calls.append(ToolCall(name, arguments))
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            tool_calls.append({"id": call_id, "type": "function", "function": function})
            results.append(self.desk.call(name, arguments))
            content = json.dumps(results[-1], ensure_ascii=False)
            tool_messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": content})
        self._turn.messages.append(
            {"role": "assistant", "reasoning_content": reasoning, "content": None, "tool_calls": tool_calls}
        )
        self._turn.messages.extend(tool_messages)
        return results

    def _answer(self, reasoning: str, text: str, *facts: str | int) -> None:
        self._turn.messages.append({"role": "assistant", "reasoning_content": reasoning, "content": text})
        self._turn.expected_facts.extend(str(fact) for fact in facts)

    # -- facts ----------------------------------------------------------------------------------------------

    def _value(self, attribute: Attribute) -> str:
        rng = self._rng
        tables = {"city": words.CITIES, "day": words.DAYS, "color": words.COLORS, "payment": words.PAYMENTS,
                  "supplier": words.SUPPLIERS}  # fmt: skip
        if attribute.key in tables:
            return rng.choice(tables[attribute.key])
        return str(rng.randint(100, 999) if attribute.key == "locker" else rng.randint(10, 99))

    def _untold(self) -> tuple[Attribute, str]:
        """An attribute and an entity about which nothing was said yet."""
        told = {(fact.attribute.key, fact.who) for fact in self._facts}
        while True:
            attribute = self._rng.choice(ATTRIBUTES)
            who = self._rng.choice(self._customers if attribute.subject == "customer" else self._items)
            if (attribute.key, who) not in told:
                return attribute, who

    def _tell(self) -> None:
        rng, told = self._rng, []
        for _ in range(2 if rng.random() < 0.3 else 1):
            attribute, who = self._untold()
            fact = _Fact(attribute, who, self._value(attribute), self._num_turns, self._num_turns)
            self._facts.append(fact)
            told.append(fact)
        sentences = [rng.choice(f.attribute.tells).format(who=f.who, value=f.value) for f in told]
        self._turn.user = rng.choice(words.TELL_PREFIXES) + " ".join(sentences)
        answer = "Noted. " + " ".join(fact.statement for fact in told)
        self._answer("I note this.", answer, *(fact.value for fact in told))

    def _pick_fact(self, facts: list[_Fact]) -> _Fact:
        """A fact to recall; one that nobody mentioned for long is likelier. Marks it as mentioned now."""
        if self._rng.random() < 0.6:
            facts = self._rng.sample(facts, min(4, len(facts)))
            fact = min(facts, key=lambda f: f.mentioned)
        else:
            fact = self._rng.choice(facts)
        self._turn.told_turns_ago = self._num_turns - fact.told
        self._turn.mentioned_turns_ago = self._num_turns - fact.mentioned
        fact.mentioned = self._num_turns
        return fact

    def _recall(self) -> None:
        fact = self._pick_fact(self._facts)
        asks = [ask.format(who=fact.who) for ask in fact.attribute.asks]
        self._say(*asks, prefixes=words.ASK_PREFIXES)
        self._answer(f"I was told the {fact.attribute.noun}.", fact.statement, fact.value)

    def _recall_unknown(self) -> None:
        attribute, who = self._untold()
        self._say(*(ask.format(who=who) for ask in attribute.asks), prefixes=words.ASK_PREFIXES)
        whom = who if attribute.subject == "customer" else f"the {who}"
        answer = f"I do not know the {attribute.noun} of {whom}."
        self._answer(f"Nobody told me the {attribute.noun}.", answer, "do not know")

    def _small_talk(self) -> None:
        weights = [5, 3, 3, 2, 1, 2]
        if self._num_turns == 0:
            weights = [8, 4, 0, 0, 1, 3]
        phrasings, reasoning, answer = self._rng.choices(words.SMALL_TALK, weights)[0]
        self._turn.user = self._rng.choice(phrasings)
        self._answer(reasoning, answer)

    # -- tools ----------------------------------------------------------------------------------------------

    def _some_order(self, *, may_be_unknown: bool = True) -> str:
        if may_be_unknown and self._rng.random() < 0.05:
            return f"{self._rng.choice('AIO')}{self._rng.randint(10, 99)}"
        return self._rng.choice(self._known_orders)

    def _look_up(self, order: str) -> dict[str, Any] | None:
        """get_order; None when there is no such order (the answer is then written) or there are no tools."""
        results = self._call("I look up the order.", ("get_order", {"order": order}))
        if results is None:
            return None
        if "error" in results[0]:
            self._answer("There is no such order.", f"I cannot find order {order}.", order)
            return None
        return results[0]

    def _status(self) -> None:
        order = self._some_order()
        self._say(f"What is the status of order {order}?", f"How is order {order}?", f"Is order {order} shipped?")
        if record := self._look_up(order):
            self._answer("I have the status.", f"Order {order} is {record['status']}.", order, record["status"])

    def _content(self) -> None:
        order = self._some_order()
        self._say(f"What is in order {order}?", f"Show order {order}.", f"Who gets order {order}?")
        if record := self._look_up(order):
            text = f"Order {order} has {record['quantity']} {record['item']} for {record['customer']}."
            self._answer("I have the order.", text, order, record["quantity"], record["item"], record["customer"])

    def _price(self) -> None:
        item = self._rng.choice(self._items)
        self._say(f"What do the {item} cost?", f"How much are the {item}?", f"What is the price of the {item}?")
        if results := self._call("I look up the price.", ("get_price", {"item": item})):
            price = results[0]["price"]
            self._answer("I have the price.", f"The {item} cost {price} euros each.", item, price)

    def _stock(self) -> None:
        item = self._rng.choice(self._items)
        self._say(f"How many {item} do we have?", f"How many {item} are in stock?", f"What is the stock of the {item}?")
        if results := self._call("I look up the stock.", ("get_stock", {"item": item})):
            stock = results[0]["stock"]
            self._answer("I have the stock.", f"We have {stock} {item}.", stock, item)

    def _calculate(self, reasoning: str, expression: str) -> int | None:
        results = self._call(reasoning, ("calculate", {"expression": expression}))
        return None if results is None else int(results[0]["result"])

    def _total(self) -> None:
        order = self._some_order(may_be_unknown=False)
        self._say(f"What is the total of order {order}?", f"How much does order {order} cost?",
                  f"What must we pay for order {order}?")  # fmt: skip
        record = self._look_up(order)
        if record is None:
            return
        results = self._call("Now the price.", ("get_price", {"item": record["item"]}))
        assert results is not None
        total = self._calculate("I multiply.", f"{record['quantity']} * {results[0]['price']}")
        self._answer("I have the total.", f"Order {order} costs {total} euros.", order, str(total))

    def _quote(self) -> None:
        item, quantity = self._rng.choice(self._items), self._rng.randint(2, 40)
        self._say(f"How much are {quantity} {item}?", f"What do {quantity} {item} cost?")
        results = self._call("I look up the price.", ("get_price", {"item": item}))
        if results is None:
            return
        total = self._calculate("I multiply.", f"{quantity} * {results[0]['price']}")
        self._answer("I have the total.", f"{quantity} {item} cost {total} euros.", item, str(total))

    def _together(self) -> None:
        left, right = self._rng.sample(self._items, 2)
        self._say(f"What do the {left} and the {right} cost together?", f"How much are the {left} plus the {right}?")
        results = self._call("I need two prices.", ("get_price", {"item": left}), ("get_price", {"item": right}))
        if results is None:
            return
        total = self._calculate("I add.", f"{results[0]['price']} + {results[1]['price']}")
        text = f"The {left} and the {right} cost {total} euros together."
        self._answer("I have the total.", text, left, right, str(total))

    def _enough(self) -> None:
        order = self._some_order(may_be_unknown=False)
        self._say(f"Do we have enough for order {order}?", f"Can we fill order {order}?")
        record = self._look_up(order)
        if record is None:
            return
        item = record["item"]
        results = self._call("Now the stock.", ("get_stock", {"item": item}))
        assert results is not None
        left = self._calculate("I subtract.", f"{results[0]['stock']} - {record['quantity']}")
        assert left is not None
        text = f"Yes, {left} {item} are left." if left >= 0 else f"No, {-left} {item} are missing."
        self._answer("I have the rest.", text, "Yes" if left >= 0 else "No", abs(left), item)

    def _create(self) -> None:
        customer, item = self._rng.choice(self._customers), self._rng.choice(self._items)
        quantity = self._rng.randint(2, 40)
        self._say(f"Order {quantity} {item} for {customer}.", f"Create an order of {quantity} {item} for {customer}.",
                  f"{customer} wants {quantity} {item}.")  # fmt: skip
        arguments = {"customer": customer, "item": item, "quantity": quantity}
        if results := self._call("I create the order.", ("create_order", arguments)):
            order = results[0]["order"]
            self._known_orders.append(order)
            text = f"Created order {order}: {quantity} {item} for {customer}."
            self._answer("It is created.", text, order, quantity, item, customer)

    def _change_order(self, reasoning: str, name: str, arguments: dict[str, Any], done: str) -> None:
        results = self._call(reasoning, (name, arguments))
        if results is None:
            return
        order, error = arguments["order"], results[0].get("error")
        if error is None:
            self._answer("It is done.", done, order, *(str(value) for value in arguments.values()))
        elif error == "not found":
            self._answer("There is no such order.", f"I cannot find order {order}.", order)
        else:
            self._answer("That is too late.", f"Order {order} is {error}.", order, error)

    def _change(self) -> None:
        order, quantity = self._some_order(), self._rng.randint(2, 40)
        self._say(f"Change order {order} to {quantity} pieces.", f"Set order {order} to {quantity} pieces.",
                  f"Order {order} needs {quantity} pieces.")  # fmt: skip
        arguments = {"order": order, "quantity": quantity}
        self._change_order("I change it.", "set_quantity", arguments, f"Order {order} now has {quantity} pieces.")

    def _cancel(self) -> None:
        order = self._some_order()
        self._say(f"Cancel order {order}.", f"Please cancel order {order}.", f"We do not need order {order} any more.")
        self._change_order("I cancel it.", "cancel_order", {"order": order}, f"Order {order} is cancelled.")

    def _ship(self) -> None:
        order, facts = self._some_order(), [f for f in self._facts if f.attribute.key == "city"]
        reasoning = "I ship it."
        if facts and self.tools is not None and self._rng.random() < 0.75:
            fact = self._pick_fact(facts)
            city, reasoning = fact.value, fact.statement
            self._say(f"Ship order {order} to {fact.who}.", f"Send order {order} to the city of {fact.who}.")
        else:
            city = self._rng.choice(words.CITIES)
            self._say(f"Ship order {order} to {city}.", f"Send order {order} to {city}.")
        done = f"Order {order} is on the way to {city}."
        self._change_order(reasoning, "ship_order", {"order": order, "city": city}, done)

    def _day(self) -> None:
        order, facts = self._some_order(), [f for f in self._facts if f.attribute.key == "day"]
        reasoning = "I set the day."
        if facts and self.tools is not None and self._rng.random() < 0.75:
            fact = self._pick_fact(facts)
            day, reasoning = fact.value, fact.statement
            self._say(f"Deliver order {order} on the day of {fact.who}.", f"Bring order {order} when {fact.who} wants.")
        else:
            day = self._rng.choice(words.DAYS)
            self._say(f"Deliver order {order} on {day}.", f"Bring order {order} on {day}.")
        self._change_order(reasoning, "set_day", {"order": order, "day": day}, f"Order {order} comes on {day}.")

    def _arithmetic(self) -> None:
        left, right = self._rng.randint(2, 99), self._rng.randint(2, 99)
        word, sign = self._rng.choice((("plus", "+"), ("minus", "-"), ("times", "*")))
        self._say(f"What is {left} {word} {right}?", f"Compute {left} {word} {right}.")
        result = self._calculate("I calculate.", f"{left} {sign} {right}")
        if result is not None:
            self._answer("I have the result.", f"{left} {word} {right} is {result}.", str(result))


def conversation(
    seed: int, num_turns: int, *, with_tools: bool = True, system: str | None = SYSTEM_PROMPT
) -> Conversation:
    """The scripted conversation of a seed: `num_turns` >= 1 turns, the same for the same arguments."""
    if num_turns < 1:
        raise ValueError(f"num_turns must be at least 1, not {num_turns}")
    writer = ConversationWriter(seed, with_tools=with_tools, system=system)
    turns = [writer.next_turn() for _ in range(num_turns)]
    return Conversation(seed, writer.system, writer.tools, turns)
