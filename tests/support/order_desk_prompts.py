"""Prompts as the bundled model knows them: beginnings of order-desk conversations, rendered as the server would."""

from __future__ import annotations

from turnkeep.models.catalog import find_model
from turnkeep.models.demo.generator import conversation
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.tokenizer import Tokenizer


def order_desk_prompts(count: int) -> list[list[int]]:
    """Token ids of odd lengths, each up to a message of the user; every third without tools."""
    source = find_model("demo")
    tokenizer = Tokenizer(source.tokenizer_json())
    template = ChatTemplate(source.chat_template() or "", bos_token=source.bos_token, eos_token=source.eos_token)
    rendered = []
    for seed in range(count):
        script = conversation(seed, 1 + seed % 4)
        messages = script.messages()
        cut = max(index for index, message in enumerate(messages) if message["role"] == "user") + 1
        tools = script.tools if seed % 3 else None
        rendered.append(tokenizer.encode(template.render(messages[:cut], tools=tools)))
    return rendered
