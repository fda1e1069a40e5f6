"""LiteLLM's SDK: streamed completions put together by its own builder."""

import json
import sys
from pathlib import Path

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main(url: str, state: Path, messages: list[str]) -> None:
    history = json.loads(state.read_text()) if state.exists() else []
    for text in messages:
        history.append({"role": "user", "content": text})
        while True:
            stream = litellm.completion(
                "openai/scripted", messages=history, tools=[TOOL], stream=True, api_base=url + "/v1", api_key="none",
                num_retries=2,
            )  # fmt: skip
            answer = litellm.stream_chunk_builder(list(stream), messages=history)
            message = answer.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                history.append({"role": "tool", "tool_call_id": call.id, "content": "sunny-42"})
        print(message.content)
        state.write_text(json.dumps(history))


main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
