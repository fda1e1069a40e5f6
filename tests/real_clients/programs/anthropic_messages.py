"""The anthropic package: streamed messages with a cache mark on the newest block."""

import json
import sys
from pathlib import Path

import anthropic

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
MARK = {"type": "ephemeral"}


def main(url: str, state: Path, messages: list[str]) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    history = json.loads(state.read_text()) if state.exists() else []
    for text in messages:
        history.append({"role": "user", "content": text})
        while True:
            last = history[-1]
            blocks = (
                [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else last["content"]
            )
            marked = [*blocks[:-1], {**blocks[-1], "cache_control": MARK}]
            sent = [*history[:-1], {**last, "content": marked}]
            with client.messages.stream(model="scripted", max_tokens=2000, messages=sent, tools=[TOOL]) as stream:
                for _ in stream:
                    pass
                message = stream.get_final_message()
            history.append({"role": "assistant", "content": [json.loads(b.model_dump_json()) for b in message.content]})
            for block in history[-1]["content"]:
                for extra in ("parsed_output", "caller", "citations"):
                    if block.get(extra) is None:
                        block.pop(extra, None)
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                break
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny-42"} for call in calls]
            history.append({"role": "user", "content": results})
        print("".join(block.text for block in message.content if block.type == "text"))
        state.write_text(json.dumps(history))


main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
