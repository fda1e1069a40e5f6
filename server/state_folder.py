"""The folder in which a server keeps what outlives it: stored responses, and the disk tier of the cache."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def asked_state_dir(given: str | None) -> str | None:
    """The folder that an option or the environment names."""
    return given or os.environ.get("TURNKEEP_STATE_DIR") or None


def state_dir(given: str | None) -> str | None:
    """The folder of stored state. Without a place that was asked for, and none that can be written: None, in memory."""
    asked = asked_state_dir(given)
    if asked is not None:
        return asked
    folder = _default_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.warning("%s cannot be used (%s): stored responses will not survive a restart", folder, error.strerror)
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        log.warning("%s cannot be written: stored responses will not survive a restart", folder)
        return None
    return str(folder)


def existing_state_dir(given: str | None) -> Path:
    """The folder that `state_dir` would take, to look at only."""
    return Path(asked_state_dir(given) or _default_folder())


def _default_folder() -> Path:
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "turnkeep"
