"""pydantic-ai over chat completions, streamed; the history as it serialises it."""

import asyncio
import sys
from collections.abc import AsyncIterable
from pathlib import Path

from pydantic_ai import Agent, ModelMessagesTypeAdapter
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny-42"


async def read(context: object, events: AsyncIterable[object]) -> None:
    """That there is a reader makes it stream."""
    async for _ in events:
        pass


async def main(url: str, state: Path, messages: list[str]) -> None:
    model = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
    agent = Agent(model, tools=[get_weather])
    history = ModelMessagesTypeAdapter.validate_json(state.read_bytes()) if state.exists() else []
    for text in messages:
        # Not run_stream: that takes the words before a call for the whole answer.
        result = await agent.run(text, message_history=history, event_stream_handler=read)
        print(result.output)
        history = result.all_messages()
        state.write_bytes(ModelMessagesTypeAdapter.dump_json(history))


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
