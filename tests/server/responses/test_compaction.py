"""A conversation made short, and how it goes on."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from live_server import live_server, saying

from turnkeep.server.responses.compaction import HEADING
from turnkeep.server.text_model import TextModel


async def test_a_compacted_conversation_goes_on_from_its_summary(text_model: TextModel) -> None:
    texts = iter(["It was sent.", "<think>What counts?</think>The user asked for B47.", "Monday."])
    async with live_server(lambda _: saying(text_model, next(texts)), text_model=text_model) as server:
        create = server.client.responses.create
        rule: Any = {"role": "developer", "content": "Be brief."}
        first = await create(model="demo", input=[rule, {"role": "user", "content": "Where is B47?"}])
        compacted = await server.client.responses.compact(model="demo", previous_response_id=first.id)
        kept, sealed = compacted.output
        again: Any = [
            *[item.model_dump(warnings=False) for item in compacted.output],
            {"role": "user", "content": "And when?"},
        ]
        await create(model="demo", input=again)
        asked, after = (text_model.tokenizer.decode(one.prompt_ids) for one in server.engine.submitted[1:])
    assert (compacted.object, kept.type, sealed.type) == ("response.compaction", "message", "compaction")
    assert compacted.usage.output_tokens > 0
    assert asked.index("Where is B47?") < asked.index("It was sent.") < asked.index("Write a summary")
    assert after.index("Be brief.") < after.index(HEADING + "The user asked for B47.") < after.index("And when?")
    assert "It was sent." not in after


async def test_what_is_too_long_is_compacted_all_the_same(text_model: TextModel) -> None:
    options = {"max_model_len": 300}
    long: Any = [{"role": role, "content": f"{role} {n} " * 4} for n in range(60) for role in ("user", "assistant")]
    async with live_server(saying(text_model, "Short."), text_model=text_model, engine_options=options) as server:
        assert (await server.client.responses.compact(model="demo", input=long)).output[-1].type == "compaction"


async def test_bad_bodies_and_silence_are_refused(text_model: TextModel) -> None:
    async with live_server(saying(text_model, ""), text_model=text_model) as server:
        for body, status, param in (
            ({}, 400, "model"),
            ({"model": "other", "input": "x"}, 404, "model"),
            ({"model": "demo"}, 400, "input"),
            ({"model": "demo", "previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ):
            got, answer = await server.post(body, "/v1/responses/compact")
            assert (got, answer["error"]["param"]) == (status, param)
        with pytest.raises(openai.InternalServerError, match="no summary"):
            await server.client.responses.compact(model="demo", input="x")
