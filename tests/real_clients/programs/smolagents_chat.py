"""smolagents' tool-calling agent; it keeps no history in files, so the second process begins anew."""

import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: which one
    """
    return "sunny-42"


def main(url: str, messages: list[str]) -> None:
    model = OpenAIServerModel("scripted", api_base=url + "/v1", api_key="none")
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=4, verbosity_level=0)
    for number, text in enumerate(messages):
        print(agent.run(text, reset=number == 0))


main(sys.argv[1], sys.argv[3:])
