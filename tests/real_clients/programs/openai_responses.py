"""openai-python, responses: streamed, the history on the client's side."""

import json
import sys
from pathlib import Path

import openai

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def main(url: str, state: Path, messages: list[str]) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    items = json.loads(state.read_text()) if state.exists() else []
    for text in messages:
        items.append({"role": "user", "content": text})
        while True:
            with client.responses.stream(model="scripted", input=items, tools=[TOOL], store=False) as stream:
                for _ in stream:
                    pass
                response = stream.get_final_response()
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny-42"})
        print(response.output_text)
        state.write_text(json.dumps(items))


main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
