"""The OpenAI Agents SDK (pip install openai-agents). Start `make serve`, then: python examples/openai_agents_sdk.py"""

from __future__ import annotations

import os

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, OrderDesk

URL = os.environ.get("TURNKEEP_BASE_URL", "http://127.0.0.1:8000/v1")
DESK = OrderDesk(seed=7)


@function_tool
def get_price(item: str) -> str:
    """price of an item"""
    return DESK.call_json("get_price", {"item": item})


def main() -> None:
    client = AsyncOpenAI(base_url=URL, api_key="none")
    model = OpenAIResponsesModel(model="demo", openai_client=client)
    agent = Agent(name="order desk", instructions=SYSTEM_PROMPT, tools=[get_price], model=model)
    item = next(iter(DESK.prices))
    result = Runner.run_sync(agent, f"What is the price of the {item}?", run_config=RunConfig(tracing_disabled=True))
    print(result.final_output)
    usage = result.context_wrapper.usage
    print(f"{usage.input_tokens_details.cached_tokens} of {usage.input_tokens} prompt tokens were reused")


if __name__ == "__main__":
    main()
