"""What a turn computes again is told in its usage, in the conversation's report and in the metrics, and adds up."""

from __future__ import annotations

from typing import Any

from live_server import LiveServer, live_server, saying, user

from turnkeep.server.text_model import TextModel

QUESTION = "Where is my parcel, please?"


async def ask(server: LiveServer, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    status, answer = await server.post({"model": "demo", "messages": messages, "conversation_id": "c", **fields})
    assert status == 200, answer
    return answer


async def metrics(server: LiveServer) -> dict[str, float]:
    async with server.session.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def test_a_turn_whose_tokens_were_evicted_says_so(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Fine."), text_model=text_model) as server:
        messages = user(QUESTION)
        first = await ask(server, messages)
        assert "lost_tokens" not in first["usage"]["prompt_tokens_details"]
        messages += [first["choices"][0]["message"], *user("And now?")]
        second = await ask(server, messages)  # the scripted engine reuses nothing
        lost = second["usage"]["prompt_tokens_details"]["lost_tokens"]
        num_held = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
        assert lost == {"evicted": num_held}
        async with server.session.get(f"{server.url}/v1/conversations/c/cache") as response:
            report = await response.json()
        assert report["totals"]["lost"]["evicted"] == num_held
        values = await metrics(server)
        assert values['turnkeep_lost_tokens_total{reason="evicted"}'] == num_held
        assert values['turnkeep_turn_prompt_tokens_total{turn="1"}'] == first["usage"]["prompt_tokens"]
        assert values['turnkeep_turn_prompt_tokens_total{turn="2"}'] == second["usage"]["prompt_tokens"]
        assert values['turnkeep_turn_cached_tokens_total{turn="2"}'] == 0


async def test_a_turn_under_another_salt_says_so(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Fine."), text_model=text_model) as server:
        first = await ask(server, user(QUESTION), cache_salt="one")
        second = await ask(server, user(QUESTION), cache_salt="two")
        lost = second["usage"]["prompt_tokens_details"]["lost_tokens"]
        assert lost == {"salt": first["usage"]["prompt_tokens"] - 1}
