"""Every requirement of cache, planning, reuse and sizing names the tests that show it, and those tests exist."""

from __future__ import annotations

import tomllib
from pathlib import Path

from named_tests import functions_of

TABLE = tomllib.loads((Path(__file__).parent / "cache_requirements.toml").read_text(encoding="utf-8"))

RULES = {f"R{number}" for number in range(1, 54)}
REPORTED = {f"H{number}" for number in (*range(1, 27), 34, 35, 36, 38, *range(45, 69))}


def test_every_cache_requirement_is_in_the_table_once() -> None:
    found = [name for group in TABLE.values() for name in group]
    assert len(found) == len(set(found))
    assert set(found) == RULES | REPORTED


def test_every_test_in_the_cache_table_exists() -> None:
    missing = [
        f"{name}: {test}"
        for group, requirements in TABLE.items()
        for name, tests in requirements.items()
        if group != "not_shown"
        for test in tests or [""]
        if test.partition("::")[2] not in functions_of(test.partition("::")[0])
    ]
    assert not missing, "\n".join(missing)


def test_what_the_cache_table_does_not_show_says_why() -> None:
    assert all(len(reason) > 40 for reason in TABLE["not_shown"].values())
