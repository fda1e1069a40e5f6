"""What the engine is told about the end of an answer that a stop string ends: how much of it will be repeated, where
anything is."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer, live_server, make_text_model, saying, user

THOUGHT = "<think>They want a story.</think>"
STORY = "Once there was a lamp that nobody wanted to buy. Then one day a man came and STOP asked for it."


async def stop(server: LiveServer, **fields: Any) -> int | None:
    """An answer that is stopped; what the engine is told."""
    num_stops = len(server.engine.num_repeated)
    status, answer = await server.post({"model": "demo", "messages": user("Tell."), "stop": ["STOP"], **fields})
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"].endswith("came and ")
    (told,) = server.engine.num_repeated[num_stops:]
    return told


@pytest.mark.parametrize(
    ("answer", "fields"),
    [(STORY, {}), (THOUGHT + STORY, {"chat_template_kwargs": {"keep_thinking": True}})],
)
async def test_a_stopped_answer_that_is_repeated_is_gone_back_for_every_time(
    answer: str, fields: dict[str, Any]
) -> None:
    model = make_text_model()  # one that has seen no other answers
    async with live_server(saying(model, answer, is_endless=True), text_model=model) as server:
        told = [await stop(server, **fields) for _ in range(3)]
        shown = len(model.tokenizer.encode(answer[: answer.index("STOP")]))
        assert all(number is not None and 0 < number <= shown for number in told)


async def test_a_stopped_answer_that_the_template_prints_otherwise_is_gone_back_for_once() -> None:
    model = make_text_model()
    async with live_server(saying(model, THOUGHT + STORY, is_endless=True), text_model=model) as server:
        told = [await stop(server) for _ in range(3)]
    assert told[0] is not None
    assert told[1:] == [None, None]
