"""The HTTP application: which address answers what. Chat is in chat_endpoint.py, refusals in http_guard.py."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

import turnkeep
from turnkeep.server import errors
from turnkeep.server.cache_report import cache_report
from turnkeep.server.chat_endpoint import ChatEndpoint
from turnkeep.server.chat_service import ChatService
from turnkeep.server.completions_endpoint import CompletionsEndpoint
from turnkeep.server.config import ServerConfig
from turnkeep.server.conversations import cache_root
from turnkeep.server.conversations_api import ConversationsEndpoint, add_conversations
from turnkeep.server.dashboard.endpoint import add_dashboard
from turnkeep.server.engine_supervisor import EngineSupervisor
from turnkeep.server.http_connection import EnvelopeRunner
from turnkeep.server.http_guard import TENANT, Authenticator, add_common_headers, json_response, make_guard
from turnkeep.server.idempotency import make_idempotency
from turnkeep.server.messages_api import MessagesEndpoint, messages_envelope
from turnkeep.server.metrics import CONTENT_TYPE, ServerMetrics
from turnkeep.server.openapi import add_documentation
from turnkeep.server.responses.endpoint import ResponsesEndpoint, add_responses
from turnkeep.server.responses.service import ResponsesService
from turnkeep.server.responses.websocket import ResponsesSocket
from turnkeep.server.stores import make_store
from turnkeep.server.tokenize_endpoint import TokenizeEndpoint


class InfoEndpoints:
    """Everything that only reports."""

    def __init__(self, service: ChatService, supervisor: EngineSupervisor, metrics: ServerMetrics) -> None:
        self._service = service
        self._supervisor = supervisor
        self._metrics = metrics
        self._created = int(time.time())

    async def health(self, request: web.Request) -> web.Response:
        """200 with an empty body while turns can be served, 503 otherwise."""
        if self._service.is_draining:
            raise errors.unavailable("The server is shutting down.", retry_after_s=5)
        self._supervisor.engine()
        return web.Response()

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": turnkeep.__version__})

    async def metrics(self, request: web.Request) -> web.Response:
        await self._supervisor.read_stats()
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: web.Request) -> web.Response:
        """The names that the model answers to, in the words of OpenAI's and of Anthropic's clients."""
        names = self._service.served_names
        data = [self._model(name) for name in names]
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": data, **ends})

    async def model(self, request: web.Request) -> web.Response:
        """One of them."""
        name = request.match_info["id"]
        if name not in self._service.served_names:
            raise errors.model_not_found(name)
        return json_response(self._model(name))

    async def conversation_cache(self, request: web.Request) -> web.Response:
        """The cache report of one conversation of this tenant; ?cache_salt= names the salt it was sent with."""
        root = cache_root(request[TENANT] or None, request.query.get("cache_salt"))
        conversation = self._service.conversations.find(root, request.match_info["id"])
        if conversation is None:
            raise errors.not_found("There is no conversation of this id.")
        return json_response(cache_report(conversation))

    async def end_conversation(self, request: web.Request) -> web.Response:
        """The conversation will not go on: what the cache keeps for it may be the first to go. Stored items stay."""
        root = cache_root(request[TENANT] or None, request.query.get("cache_salt"))
        conversation_id = request.match_info["id"]
        if self._service.conversations.find(root, conversation_id) is None:
            raise errors.not_found("There is no conversation of this id.")
        self._service.close_conversation(root, conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.cache.deleted", "deleted": True})

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "turnkeep",
            "type": "model",
            "display_name": name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created)),
            "max_model_len": self._service.max_model_len,
        }


def make_app(
    service: ChatService, supervisor: EngineSupervisor, metrics: ServerMetrics, config: ServerConfig
) -> web.Application:
    """All routes behind one guard. The caller owns the service and the supervisor."""
    guard = make_guard(Authenticator(config.api_keys), metrics, {"/v1/messages": messages_envelope})
    app = web.Application(middlewares=[guard, make_idempotency()], client_max_size=config.max_body_bytes)
    app.on_response_prepare.append(add_common_headers)
    chat = ChatEndpoint(service, config, metrics)
    info = InfoEndpoints(service, supervisor, metrics)
    add_stored_state(app, service, metrics, config)
    app.router.add_post("/v1/chat/completions", chat.complete)
    app.router.add_post("/v1/chat/completions/render", chat.render)
    messages = MessagesEndpoint(service, config, metrics)
    app.router.add_post("/v1/messages", messages.create)
    app.router.add_post("/v1/messages/count_tokens", messages.count_tokens)
    app.router.add_post("/v1/completions", CompletionsEndpoint(service, config, metrics).complete)
    tokens = TokenizeEndpoint(service)
    for prefix in ("", "/v1"):
        app.router.add_post(f"{prefix}/tokenize", tokens.tokenize)
        app.router.add_post(f"{prefix}/detokenize", tokens.detokenize)
    app.router.add_get("/v1/models", info.models)
    app.router.add_get("/v1/models/{id:.+}", info.model)
    app.router.add_get("/v1/conversations/{id}/cache", info.conversation_cache)
    app.router.add_delete("/v1/conversations/{id}/cache", info.end_conversation)
    for path in ("/health", "/v1/health", "/ping", "/ready"):
        app.router.add_get(path, info.health)
    app.router.add_get("/version", info.version)
    app.router.add_get("/metrics", info.metrics)
    add_dashboard(app, service, supervisor)
    add_documentation(app, has_keys=bool(config.api_keys))
    return app


def add_stored_state(app: web.Application, service: ChatService, metrics: ServerMetrics, config: ServerConfig) -> None:
    """Responses and conversations, and the store that lives as long as the application."""
    store = make_store(config.state_dir, config.redis_url)

    async def opened(_: web.Application) -> AsyncIterator[None]:
        await store.open()
        service.registry = store
        yield
        await store.close()

    app.cleanup_ctx.append(opened)
    responses = ResponsesService(service, store)
    add_responses(app, ResponsesEndpoint(responses, config, metrics), ResponsesSocket(responses, config, metrics))
    add_conversations(app, ConversationsEndpoint(service, store))


def make_runner(app: web.Application, config: ServerConfig) -> web.AppRunner:
    """How connections are handled: a client that goes away cancels its handler, which aborts its turn."""
    return EnvelopeRunner(
        app,
        handler_cancellation=True,
        keepalive_timeout=config.keep_alive_s,
        access_log=None,
        shutdown_timeout=5.0,
        handle_signals=False,
    )
