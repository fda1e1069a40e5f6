"""Engine loops around tiny models with random weights, and a way to run requests through them to their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
from scripted_drafter import AnyGrant

from turnkeep.cache.boundary import Boundary, BoundaryKind
from turnkeep.cache.config import CacheConfig
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.factory import assemble, head_drafter, resolve_sizes
from turnkeep.engine.loop import EngineLoop
from turnkeep.engine.messages import Finished, FromEngine, Ready, Stats, Submit, Tokens
from turnkeep.engine.speculation.drafter import Drafter
from turnkeep.engine.speculation.settings import NO_SPECULATION, Speculation
from turnkeep.models.catalog import find_model
from turnkeep.models.config import ModelConfig
from turnkeep.models.decoder import Decoder
from turnkeep.models.tiny import TinyKind, tiny_config
from turnkeep.models.weights import load_model, random_model
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.speculation_config import SpeculationConfig

VOCAB_SIZE = 97
_MODELS: dict[TinyKind, torch.nn.Module] = {}


def tiny_model(kind: TinyKind) -> torch.nn.Module:
    """The same weights for every test of a kind."""
    if kind not in _MODELS:
        _MODELS[kind] = random_model(ModelConfig.from_dict(tiny_config(kind)), seed=1)
    return _MODELS[kind]


def engine_config(**settings: object) -> EngineConfig:
    """Fields of EngineConfig, and of CacheConfig where prefix_caching is given."""
    defaults = {"model": "tiny", "dtype": "float32", "page_size": 8, "num_pages": 200, "num_state_rows": 60}
    if "prefix_caching" in settings:
        settings["cache"] = CacheConfig(prefix_caching=settings.pop("prefix_caching"))  # type: ignore[arg-type]
    return EngineConfig(**(defaults | settings))  # type: ignore[arg-type]


@cache
def demo_model() -> Decoder:
    """The bundled model in float32."""
    return load_model(find_model("demo"), dtype=torch.float32)


def make_demo_loop(
    drafter: Drafter | Literal["head"] | None = None,
    limits: SpeculationConfig | None = None,
    *,
    fingerprint: bytes | None = None,
    **settings: object,
) -> LoopBench:
    """An engine loop around the bundled model, where its own head or another drafter drafts all that `limits` allow,
    in every step. fingerprint: of the weights; without one nothing outlives the loop."""
    source, events = find_model("demo"), list[FromEngine]()
    model_config = ModelConfig.from_dict(source.config_dict())
    config = engine_config(**({"num_pages": 800} | settings))
    speculation, make_drafter = NO_SPECULATION, None
    if drafter is not None:
        speculation = Speculation("mtp" if drafter == "head" else "tokens", limits or SpeculationConfig())
        head = head_drafter(source, demo_model(), config)
        make_drafter = (lambda tensors: AnyGrant(head(tensors))) if drafter == "head" else lambda _: drafter
    sizes = resolve_sizes(config, model_config, "float32", speculation)
    loop, _ = assemble(
        demo_model(),
        model_config,
        config,
        sizes,
        "float32",
        events.append,
        model_name="demo",
        fingerprint=fingerprint,
        speculation=speculation,
        make_drafter=make_drafter,
    )
    return LoopBench(loop, events)


def build_tiny(
    kind: TinyKind,
    config: EngineConfig,
    outbox: Callable[[FromEngine], None],
    drafter: Drafter | None = None,
    limits: SpeculationConfig | None = None,
) -> tuple[EngineLoop, Ready]:
    """An engine loop over the tiny model of a kind. A drafter of tokens may draft for it, within `limits`."""
    model_config = ModelConfig.from_dict(tiny_config(kind))
    speculation = NO_SPECULATION if drafter is None else Speculation("tokens", limits or SpeculationConfig())
    sizes = resolve_sizes(config, model_config, "float32", speculation)
    return assemble(
        tiny_model(kind),
        model_config,
        config,
        sizes,
        "float32",
        outbox,
        model_name="tiny",
        speculation=speculation,
        make_drafter=None if drafter is None else lambda _: drafter,
        fingerprint=f"tiny {kind}".encode(),
    )


@dataclass
class LoopBench:
    """A loop and what it said."""

    loop: EngineLoop
    events: list[FromEngine] = field(default_factory=list)

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.loop.has_work:
                return
            self.loop.step()
        raise AssertionError(f"work is left after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, Tokens) and event.request_id == request_id
            for token in event.token_ids
        ]

    def finished(self, request_id: str) -> Finished:
        (event,) = [event for event in self.events if isinstance(event, Finished) and event.request_id == request_id]
        return event

    def stats(self) -> Stats:
        return self.loop.stats()


def make_drafting_loop(
    kind: TinyKind, drafter: Drafter, limits: SpeculationConfig, **settings: int | bool | str | None
) -> LoopBench:
    events: list[FromEngine] = []
    loop, _ = build_tiny(kind, engine_config(**settings), events.append, drafter, limits)
    return LoopBench(loop, events)


def make_loop(kind: TinyKind, **settings: object) -> LoopBench:
    events: list[FromEngine] = []
    loop, _ = build_tiny(kind, engine_config(**settings), events.append)
    return LoopBench(loop, events)


def submit(
    request_id: str,
    prompt_ids: Sequence[int],
    max_new_tokens: int = 8,
    *,
    boundaries: Sequence[tuple[int, BoundaryKind]] = (),
    conversation_id: str | None = None,
    may_be_stopped: bool = False,
    **sampling: object,
) -> Submit:
    return Submit(
        request_id=request_id,
        prompt_ids=EncodedTokens(prompt_ids),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),  # type: ignore[arg-type]
        boundaries=tuple(Boundary(position, kind) for position, kind in boundaries),
        conversation_id=conversation_id,
        may_be_stopped=may_be_stopped,
    )
