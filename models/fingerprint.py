"""Names the weights of a model, so that what was computed with others is never taken for its own. Torch-free.

Not a digest of all their bytes, which would take as long as loading them: sizes, times of change and both ends of every
file. Whoever changes weights in place without any of that showing has to clear the cache himself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from turnkeep.models.model_source import ModelSource

SAMPLE_BYTES = 65536


def model_fingerprint(source: ModelSource) -> bytes:
    """32 bytes. Equal for the same files in the same place or moved with their times, else different."""
    digest = hashlib.sha256(json.dumps(source.config_dict(), sort_keys=True, default=str).encode())
    for path in _weight_files(source):
        status = path.stat()
        digest.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(status.st_size - SAMPLE_BYTES, 0))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _weight_files(source: ModelSource) -> Iterator[Path]:
    path = source.path
    yield from sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
