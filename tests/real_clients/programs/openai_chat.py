"""openai-python, chat completions: streamed, with its accumulating helper and a loop of one's own."""

import json
import sys
from pathlib import Path

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main(url: str, state: Path, messages: list[str]) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    history = json.loads(state.read_text()) if state.exists() else []
    for text in messages:
        history.append({"role": "user", "content": text})
        while True:
            with client.chat.completions.stream(model="scripted", messages=history, tools=[TOOL]) as stream:
                for _ in stream:
                    pass
                message = stream.get_final_completion().choices[0].message
            history.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in history[-1].get("tool_calls", []):
                call["function"].pop("parsed_arguments", None)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                history.append({"role": "tool", "tool_call_id": call.id, "content": "sunny-42"})
        print(message.content)
        state.write_text(json.dumps(history))


main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
