"""pydantic-ai over chat completions, streamed; the history as it serialises it."""

import asyncio
import sys
from pathlib import Path

from pydantic_ai import Agent, ModelMessagesTypeAdapter
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny-42"


async def main(url: str, state: Path, messages: list[str]) -> None:
    model = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
    agent = Agent(model, tools=[get_weather])
    history = ModelMessagesTypeAdapter.validate_json(state.read_bytes()) if state.exists() else []
    for text in messages:
        async with agent.run_stream(text, message_history=history) as result:
            print(await result.get_output())
        history = result.all_messages()
        state.write_bytes(ModelMessagesTypeAdapter.dump_json(history))


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
