"""The OpenAI Agents SDK over responses, with its own session kept in a file."""

import asyncio
import sys

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, SQLiteSession, function_tool
from openai import AsyncOpenAI


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny-42"


async def main(url: str, state: str, messages: list[str]) -> None:
    client = AsyncOpenAI(base_url=url + "/v1", api_key="none")
    model = OpenAIResponsesModel(model="scripted", openai_client=client)
    agent = Agent(name="clerk", instructions="You tell the weather.", model=model, tools=[get_weather])
    session = SQLiteSession("one", state)
    for text in messages:
        result = Runner.run_streamed(agent, text, session=session, run_config=RunConfig(tracing_disabled=True))
        async for _ in result.stream_events():
            pass
        print(result.final_output)


asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
