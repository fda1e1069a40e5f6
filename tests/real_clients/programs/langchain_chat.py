"""langchain-openai: streamed chat completions with a bound tool, messages kept as LangChain writes them."""

import json
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage, ToolMessage, messages_from_dict, messages_to_dict
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny-42"


def main(url: str, state: Path, messages: list[str]) -> None:
    model = ChatOpenAI(model="scripted", base_url=url + "/v1", api_key="none").bind_tools([get_weather])
    history = messages_from_dict(json.loads(state.read_text())) if state.exists() else []
    for text in messages:
        history.append(HumanMessage(text))
        while True:
            answer = None
            for chunk in model.stream(history):
                answer = chunk if answer is None else answer + chunk
            history.append(answer)
            if not answer.tool_calls:
                break
            history += [ToolMessage("sunny-42", tool_call_id=call["id"]) for call in answer.tool_calls]
        print(answer.content)
        state.write_text(json.dumps(messages_to_dict(history)))


main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
