"""LangChain (pip install langchain-openai). Start `make serve`, then: python examples/langchain_agent.py"""

from __future__ import annotations

import os

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, OrderDesk

URL = os.environ.get("TURNKEEP_BASE_URL", "http://127.0.0.1:8000/v1")
DESK = OrderDesk(seed=7)


@tool
def get_price(item: str) -> str:
    """price of an item"""
    return DESK.call_json("get_price", {"item": item})


def main() -> None:
    model = ChatOpenAI(model="demo", base_url=URL, api_key="none").bind_tools([get_price])
    item = next(iter(DESK.prices))
    messages: list[BaseMessage] = [SystemMessage(SYSTEM_PROMPT), HumanMessage(f"What is the price of the {item}?")]
    while True:
        answer = model.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            messages.append(ToolMessage(get_price.invoke(call["args"]), tool_call_id=call["id"]))
    print(answer.content)
    print(answer.usage_metadata)


if __name__ == "__main__":
    main()
