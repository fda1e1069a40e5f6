"""An engine loop driven by hand: submit a set of requests, step until all have finished, look at what came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.config import CacheConfig
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.factory import build_engine
from turnkeep.engine.messages import Admitted, EndTurn, Finished, FromEngine, Submit, Tokens
from turnkeep.engine.token_choice import ChosenTokens
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import StepItem


@dataclass
class Outcome:
    """One finished request; logits has a row for each generated token when they were recorded."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finished: Finished | None = None


class SteppedEngine:
    """`options` are EngineConfig fields; the model's logits of sampled rows are kept in `logits` by request."""

    def __init__(self, model: str = "demo", **options: Any) -> None:
        settings: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "memory_bytes": 256 << 20, **options}
        if "prefix_caching" in settings:
            settings["cache"] = CacheConfig(prefix_caching=settings.pop("prefix_caching"))
        self.events: list[FromEngine] = []
        self.loop, self.ready = build_engine(EngineConfig(model=model, **settings), self.events.append)
        self.logits: dict[str, list[torch.Tensor]] = {}
        self._ids = count()
        self._record_logits()

    def _record_logits(self) -> None:
        choice: Any = self.loop._runner._choice  # type: ignore[attr-defined]
        choose = choice.choose

        def recording_choose(items: Sequence[StepItem], logits: torch.Tensor) -> ChosenTokens:
            chosen: ChosenTokens = choose(items, logits)
            start = 0
            for item in items:
                nodes = [0, *(node + 1 for node in chosen.accepted.get(item.request_id, ()))]
                self.logits.setdefault(item.request_id, []).extend(logits[start + node].clone() for node in nodes)
                start += 1 + (item.draft.num_nodes if item.draft is not None else 0)
            assert start == len(logits)
            return chosen

        choice.choose = recording_choose

    def run(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        max_new_tokens: int = 12,
        boundaries: Sequence[int] = (),
        conversation_id: str | None = None,
        sampling: SamplingParams | None = None,
        stable: bool = True,
    ) -> list[Outcome]:
        """Submit all prompts at once and step until each has finished."""
        sampling = sampling or SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        order = []
        for prompt in prompts:
            request_id = f"r{next(self._ids)}"
            order.append(request_id)
            kinds = tuple(Boundary(p, "declared") for p in boundaries if p <= len(prompt))
            self.loop.receive(
                Submit(
                    request_id=request_id,
                    prompt_ids=EncodedTokens(prompt),
                    sampling=sampling,
                    boundaries=kinds,
                    conversation_id=conversation_id,
                )
            )
        while self.loop.has_work:
            assert self.loop.step(), "work, but no step"
        outcomes = self._outcomes()
        for request_id in order:
            assert request_id in outcomes
            if stable:
                self.loop.receive(EndTurn(request_id, 1 << 30))
        return [outcomes[request_id] for request_id in order]

    def _outcomes(self) -> dict[str, Outcome]:
        found: dict[str, Outcome] = {}
        for event in self.events:
            if isinstance(event, Admitted):
                found.setdefault(
                    event.request_id, Outcome(event.request_id)
                ).num_cached_tokens = event.num_cached_tokens
            elif isinstance(event, Tokens):
                found.setdefault(event.request_id, Outcome(event.request_id)).token_ids += event.token_ids
            elif isinstance(event, Finished):
                outcome = found.setdefault(event.request_id, Outcome(event.request_id))
                assert outcome.finished is None, "two Finished events"
                outcome.finished = event
        self.events.clear()
        return found
