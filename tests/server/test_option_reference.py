"""The written reference of settings is that of the options which exist."""

from __future__ import annotations

from pathlib import Path

from turnkeep.server.cli import serve_parser
from turnkeep.server.option_reference import option_reference

WRITTEN = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_reference_of_settings_is_true() -> None:
    assert WRITTEN.read_text(encoding="utf-8") == option_reference(serve_parser()), (
        "write it again: python -m turnkeep.server.option_reference > docs/configuration.md"
    )


def test_the_reference_knows_every_cache_setting() -> None:
    text = WRITTEN.read_text(encoding="utf-8")
    for name in ("reuse-policy", "periodic-snapshot-interval", "mamba-state-cache-interval", "branch-snapshots"):
        assert f"`--{name}`" in text
