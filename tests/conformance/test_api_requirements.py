"""Every requirement of the HTTP API names the tests that show it, and those tests exist."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((Path(__file__).parent / "api_requirements.toml").read_text(encoding="utf-8"))

# How many there are of each kind; numbered without gaps.
COUNTS = {
    "API-MSG": 10, "API-MODEL": 1, "API-TOOL": 2, "API-FMT": 1, "API-STR": 1, "API-EXTRA": 1, "API-CH": 13, "API-RS": 5,
    "API-US": 4, "API-ERR": 6, "API-CAN": 3, "API-FLT": 3, "CONV-ID": 10, "CONV-STATE": 4, "TPL": 14, "TPL-TOK": 1,
    "PARSE": 20, "SEC-AUTH": 2, "SEC-ADM": 1, "SEC-SER": 2, "SEC-TPL": 3, "SEC-INJ": 1, "SEC-SSRF": 1, "SEC-LEAK": 1,
    "SEC-LIM": 4, "SEC-NUM": 1, "SEC-GRM": 2, "SEC-TIME": 3, "SEC-JSON": 2, "SEC-AMP": 1, "SEC-LOG": 1, "SEC-SLOW": 2,
    "SEC-CAN": 1, "SEC-DOS": 2, "SEC-MEM": 1, "SEC-REL": 4, "SEC-CORS": 1, "SEC-SUPPLY": 1,
}  # fmt: skip
UNNUMBERED = {"TPL-CLK"}


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_requirement_is_in_the_table_once() -> None:
    found = [name for group in TABLE.values() for name in group]
    expected = {f"{kind}-{number}" for kind, count in COUNTS.items() for number in range(1, count + 1)} | UNNUMBERED
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_every_test_in_the_table_exists() -> None:
    missing = []
    for group, requirements in TABLE.items():
        for name, tests in requirements.items() if group != "not_shown" else ():
            assert tests, name
            for test in tests:
                path, _, function = test.partition("::")
                if not (TESTS / path).is_file() or function not in functions_of(path):
                    missing.append(f"{name}: {test}")
    assert not missing, "\n".join(missing)


def test_what_is_not_shown_says_why() -> None:
    assert all(len(reason) > 40 for reason in TABLE["not_shown"].values())
