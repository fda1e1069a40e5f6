"""What tests need that an installation by hand may lack. `make test` installs all of it: there it must be found."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip, or fail where everything was to be installed: a skip would hide a broken installation from CI."""
    if os.environ.get("TURNKEEP_COMPLETE_TESTS"):
        pytest.fail(f"make test should have installed this: {reason}")
    pytest.skip(reason)
