"""POST /tokenize and /detokenize: what a text or a conversation is in tokens, and back. Computes nothing."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from turnkeep.server import errors
from turnkeep.server.chat_completions import convert_request, decode_request
from turnkeep.server.chat_service import ChatService
from turnkeep.server.http_guard import TENANT, json_response
from turnkeep.server.request_body import read_body


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a prompt, as completions take it, or messages with what decides their rendering."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)

CHAT_FIELDS = (
    "messages", "tools", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message"
)  # fmt: skip


class TokenizeEndpoint:
    """The handlers; one instance serves all requests."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    async def tokenize(self, request: web.Request) -> web.Response:
        """The very ids that the same prompt or messages give to a completion."""
        body = await read_body(request, lambda data: decode_request(_tokenize_decoder, data))
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise errors.bad_request("Either prompt or messages is needed, and not both.", "prompt")
        tokenizer = self._service.text_model.tokenizer
        if body.prompt is not None:
            text = body.prompt
            token_ids = await self._service.in_text_worker(lambda: tokenizer.encode(text))
        else:
            fields = {name: getattr(body, name) for name in CHAT_FIELDS}
            chat = convert_request({"model": self._service.served_names[0], **fields})
            _, prompt, _, _ = await self._service.prepare(chat, request.headers, request[TENANT])
            token_ids = prompt.encoded.token_ids
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._service.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        return json_response(answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of token ids, control tokens included."""
        body = await read_body(request, lambda data: decode_request(_detokenize_decoder, data))
        self._check_model(body.model)
        tokenizer = self._service.text_model.tokenizer
        for index, token_id in enumerate(body.tokens):
            if not 0 <= token_id < tokenizer.vocab_size:
                message = f"A token id is at least 0 and less than {tokenizer.vocab_size}."
                raise errors.bad_request(message, f"tokens[{index}]")
        text = await self._service.in_text_worker(lambda: tokenizer.decode(body.tokens))
        return json_response({"prompt": text})

    def _check_model(self, name: str | None) -> None:
        if name is not None and not self._service.serves(name):
            raise errors.model_not_found(name)
