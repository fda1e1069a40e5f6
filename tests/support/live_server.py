"""A server on a loopback port inside the test's event loop, with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
from aiohttp import web
from scripted_engine import Director, Script, ScriptedEngine

from turnkeep.engine.config import EngineConfig
from turnkeep.engine.messages import Submit
from turnkeep.models.demo import rendering
from turnkeep.server.app import make_app, make_runner
from turnkeep.server.chat_service import ChatService
from turnkeep.server.config import ServerConfig
from turnkeep.server.engine_supervisor import EngineSupervisor
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.tenant_limits import make_limits
from turnkeep.server.text_model import TextModel
from turnkeep.server.turn_request import SamplingDefaults

END_TOKEN_ID = 2
CHAT = "/v1/chat/completions"


def make_text_model(name: str = "demo") -> TextModel:
    """The bundled model's tokenizer and template, without its weights."""
    folder = rendering.DIRECTORY
    return TextModel(
        (folder / "tokenizer.json").read_text(),
        (folder / "chat_template.jinja").read_text(),
        name=name,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        eos_token_ids=(END_TOKEN_ID,),
        sampling_defaults=SamplingDefaults(temperature=0.0),
    )


def saying(text_model: TextModel, text: str, **script: Any) -> Script:
    """A script that says a text, markup included, and ends."""
    return Script([*text_model.tokenizer.encode(text), END_TOKEN_ID], **script)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@dataclass
class LiveServer:
    """What a test needs to look at from both sides."""

    url: str
    port: int
    service: ChatService
    supervisor: EngineSupervisor
    metrics: ServerMetrics
    session: aiohttp.ClientSession
    client: openai.AsyncOpenAI
    engines: list[ScriptedEngine] = field(default_factory=list)
    runner: web.AppRunner | None = None

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[-1]

    async def post(
        self, body: Mapping[str, Any] | bytes, path: str = CHAT, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=sent) as response:
            return response.status, await response.json()

    async def chat(self, text: str = "Hello!", **fields: Any) -> tuple[int, dict[str, Any]]:
        return await self.post({"model": "demo", "messages": user(text), **fields})

    async def stream(self, text: str = "Hello!", **fields: Any) -> bytes:
        """The whole body of a streamed answer."""
        body = {"model": "demo", "messages": user(text), "stream": True, **fields}
        async with self.session.post(self.url + CHAT, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text

    async def metric(self, sample: str) -> float:
        """The value of one sample, labels included; 0 when it is not there."""
        for line in (await self.get("/metrics"))[1].splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until the server has come to a state that nothing announces."""
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def live_server(
    director: Director | Script,
    *,
    text_model: TextModel,
    engine_options: Mapping[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[LiveServer]:
    """`config` are fields of ServerConfig."""
    engines: list[ScriptedEngine] = []

    def direct(submit: Submit) -> Script:
        return director if isinstance(director, Script) else director(submit)

    def make_engine() -> ScriptedEngine:
        engines.append(ScriptedEngine(direct, **(engine_options or {})))
        return engines[-1]

    settings = ServerConfig(engine=EngineConfig(model="demo"), port=0, **config)
    metrics = ServerMetrics()
    supervisor = EngineSupervisor(make_engine, metrics, first_pause_s=0.01, watch_interval_s=0.01)
    service = ChatService(
        text_model,
        supervisor,
        metrics,
        served_names=settings.served_model_names,
        accept_any_model=settings.accept_any_model,
        max_waiting=settings.max_waiting,
        limits=make_limits(settings),
    )
    runner = make_runner(make_app(service, supervisor, metrics, settings), settings)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    await supervisor.start()
    url = f"http://127.0.0.1:{port}"
    session = aiohttp.ClientSession()
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    try:
        yield LiveServer(url, port, service, supervisor, metrics, session, client, engines, runner)
    finally:
        await session.close()
        await client.close()
        await supervisor.close()
        await service.close()
        await runner.cleanup()


def events(body: bytes) -> list[Any]:
    """The payloads of a stream; "[DONE]" as text. Comments are left out."""
    assert body.endswith(b"\n\n"), body[-80:]
    payloads = []
    for frame in body.decode().split("\n\n")[:-1]:
        if frame.startswith(":"):
            continue
        assert frame.startswith("data: "), frame
        assert "\n" not in frame, frame
        payloads.append(frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]))
    return payloads
