"""A tool loop with Anthropic's own SDK. Start `make serve`, then: python examples/anthropic_sdk.py"""

from __future__ import annotations

import os

import anthropic

from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, TOOLS, OrderDesk

URL = os.environ.get("TURNKEEP_BASE_URL", "http://127.0.0.1:8000/v1").removesuffix("/v1")


def main() -> None:
    desk = OrderDesk(seed=7)
    item = next(iter(desk.prices))
    tools: list[anthropic.types.ToolParam] = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in TOOLS
    ]
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": f"What is the price of the {item}?"}]
    with anthropic.Anthropic(base_url=URL, api_key="none") as client:
        while True:
            answer = client.messages.create(
                model="demo", max_tokens=256, system=SYSTEM_PROMPT, tools=tools, messages=messages
            )
            messages.append({"role": "assistant", "content": answer.content})
            print(
                answer.stop_reason,
                answer.usage.input_tokens,
                "computed,",
                answer.usage.cache_read_input_tokens,
                "reused",
            )
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results: list[anthropic.types.ToolResultBlockParam] = [
                {"type": "tool_result", "tool_use_id": call.id, "content": desk.call_json(call.name, dict(call.input))}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
    print("".join(block.text for block in answer.content if block.type == "text"))


if __name__ == "__main__":
    main()
