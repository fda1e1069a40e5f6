"""Bare texts continued, and text in tokens and back, over HTTP."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from live_server import LiveServer, events, live_server, saying, user
from text_fixtures import byte_level_json

from turnkeep.engine.messages import Submit
from turnkeep.server.text_model import TextModel

PATH = "/v1/completions"
MARKUP = '<think>x</think> and <tool_call>{"name": "a"}</tool_call>'


async def stream(server: LiveServer, **fields: Any) -> list[Any]:
    async with server.session.post(server.url + PATH, json={"model": "demo", "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        return events(await response.read())


@pytest.mark.parametrize("text", ["Hello there, you", MARKUP, ""])
@pytest.mark.parametrize("tokens_per_event", [1, 100])
async def test_a_stream_adds_up_to_the_plain_answer_and_markup_is_text(
    text_model: TextModel, text: str, tokens_per_event: int
) -> None:
    script = saying(text_model, text, tokens_per_event=tokens_per_event, num_cached_tokens=1)
    fields: dict[str, Any] = {"prompt": "Say it:", "max_tokens": 99, "logprobs": 2, "return_token_ids": True}
    async with live_server(script, text_model=text_model) as server:
        status, plain = await server.post({"model": "demo", **fields}, PATH)
        assert status == 200, plain
        *chunks, done = await stream(server, **fields, stream_options={"include_usage": True})
        assert server.engine.submitted[0].prompt_ids == text_model.tokenizer.encode("Say it:")
    choice = plain["choices"][0]
    assert choice["text"] == text
    assert choice["finish_reason"] == "stop"
    assert done == "[DONE]"
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"] == plain["usage"]
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert "".join(piece["text"] for piece in pieces) == text
    assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"] == script.token_ids
    logprobs = choice["logprobs"] or {"tokens": [], "text_offset": []}
    for name, column in logprobs.items():
        assert [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][name]] == column
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]


async def test_prompts_of_every_form_are_numbered_through(text_model: TextModel) -> None:
    """The answer repeats its own prompt, so a choice under the wrong index shows."""

    def repeat(submit: Submit) -> Any:
        return saying(text_model, text_model.tokenizer.decode(submit.prompt_ids))

    ids = text_model.tokenizer.encode("two")
    async with live_server(repeat, text_model=text_model) as server:
        mixed = {"prompt": ["one", ids, "three"], "n": 2, "max_tokens": 50}
        _, plain = await server.post({"model": "demo", **mixed}, PATH)
        chunks = await stream(server, **mixed)
        _, single = await server.post({"model": "demo", "prompt": ids, "max_tokens": 50}, PATH)
    expected = ["one", "one", "two", "two", "three", "three"]
    assert [choice["text"] for choice in plain["choices"]] == expected
    assert [choice["index"] for choice in plain["choices"]] == list(range(6))
    texts = [""] * 6
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == expected
    assert single["choices"][0]["text"] == "two"
    sizes = [len(text_model.tokenizer.encode(text)) for text in ("one", "two", "three")]
    assert plain["usage"]["prompt_tokens"] == sum(sizes)
    assert plain["usage"]["completion_tokens"] == 2 * (sum(sizes) + 3)


async def test_echo_repeats_the_prompt_once_in_front(text_model: TextModel) -> None:
    async with live_server(saying(text_model, " world"), text_model=text_model) as server:
        answer = await server.client.completions.create(model="demo", prompt="Hello", echo=True)
        chunks = await stream(server, prompt="Hello", echo=True)
    assert answer.choices[0].text == "Hello world"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "Hello world"
    assert chunks[0]["choices"][0]["text"].startswith("Hello")


async def test_one_refused_prompt_refuses_the_request_and_leaves_nothing_running(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "word", is_endless=True), text_model=text_model) as server:
        body = {"model": "demo", "prompt": ["short", "word " * 9000], "max_tokens": 4000}
        status, answer = await server.post(body, PATH)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        await server.until(lambda: server.service.num_open_turns == 0 and server.engine.num_playing == 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [5, 1280]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "n": 9}, "n"),
    ],
)
async def test_what_is_wrong_is_named(text_model: TextModel, fields: dict[str, Any], param: str) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        status, answer = await server.post({"model": "demo", **fields}, PATH)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_tokenize_gives_the_ids_that_chat_and_completions_use(text_model: TextModel) -> None:
    tool = {"type": "function", "function": {"name": "get_order"}}
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        await server.chat("Where is my order?", tools=[tool])
        await server.post({"model": "demo", "prompt": "Once upon"}, PATH)
        chat, text = (list(submit.prompt_ids) for submit in server.engine.submitted)
        _, first = await server.post({"messages": user("Where is my order?"), "tools": [tool]}, "/tokenize")
        _, second = await server.post({"prompt": "Once upon", "return_token_strs": True}, "/v1/tokenize")
        _, back = await server.post({"tokens": chat}, "/detokenize")
    assert first == {"count": len(chat), "max_model_len": 4096, "tokens": chat}
    assert second["tokens"] == text
    assert len(second["token_strs"]) == len(text)
    assert back["prompt"] == text_model.tokenizer.decode(chat)
    assert "<|user|>Where is my order?<|end|>" in back["prompt"]


async def test_tokenize_is_behind_the_key_and_refuses_what_makes_no_sense(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model, api_keys=("k",)) as server:
        assert (await server.post({"prompt": "x"}, "/tokenize"))[0] == 401
        key = {"Authorization": "Bearer k"}
        for path, body, param in [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": user("x")}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/detokenize", {"tokens": [0, 10**6]}, "tokens[1]"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
        ]:
            status, answer = await server.post(body, path, key)
            assert (status, answer["error"]["param"]) == (400, param), path
        assert (await server.post({"prompt": "x", "model": "other"}, "/tokenize", key))[0] == 404


async def test_an_engine_that_dies_is_an_error_of_the_official_client(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "word", is_endless=True), text_model=text_model) as server:
        answer = await server.client.completions.create(model="demo", prompt=["a", "b"], max_tokens=4000, stream=True)

        async def read() -> None:
            async for _ in answer:
                server.engine.die()

        with pytest.raises(openai.APIError):
            await read()
        await server.until(lambda: server.service.num_open_turns == 0)


def test_a_bare_text_begins_once_with_what_the_tokenizer_puts_before_texts() -> None:
    model = TextModel(byte_level_json(), None, name="begins", bos_token="<|bos|>", eos_token=None, eos_token_ids=())
    begin = model.tokenizer.token_id("<|bos|>")
    plain = model.tokenizer.encode("the order")
    assert model.prepare_text("the order").encoded.token_ids == [begin, *plain]
    assert model.prepare_text("<|bos|>the order").encoded.token_ids == [begin, *plain]


def test_a_bare_prompt_asked_again_resumes_before_its_last_token(text_model: TextModel) -> None:
    prompt = text_model.prepare_text("Say it once more:")
    (boundary,) = prompt.boundaries
    assert boundary.position == len(prompt.encoded.token_ids) - 1
    assert text_model.prepare_tokens([5]).boundaries == ()
