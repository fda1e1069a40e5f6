"""The names of the test functions in a file, without importing it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


@cache
def functions_of(path: str) -> frozenset[str]:
    """Of a file below tests/; none when there is no such file."""
    if not (TESTS / path).is_file():
        return frozenset()
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
