"""Who drafts, told from settings and model before any weight is read."""

from __future__ import annotations

import pytest

from turnkeep.engine.config import EngineConfig
from turnkeep.engine.speculation import settings
from turnkeep.models.catalog import find_model
from turnkeep.models.config import ModelConfig


def resolve(**fields: str) -> settings.Speculation:
    source = find_model("demo")
    config = EngineConfig(model="demo", **fields)  # type: ignore[arg-type]
    return settings.resolve_drafts(config, source, ModelConfig.from_dict(source.config_dict()))


def test_drafts_need_states_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "why_no_draft_head", lambda source, config: None)
    assert resolve(speculation="auto").drafter == "mtp"
    without = resolve(speculation="auto", state_dtype="float16")
    assert without.drafter is None
    assert without.notices == ("speculation is off: drafts are verified on states in float32, these are in float16",)
    with pytest.raises(ValueError, match="verified on states in float32, these are in bfloat16"):
        resolve(speculation="mtp", state_dtype="bfloat16")
    assert resolve(speculation="off", state_dtype="float16").drafter is None
