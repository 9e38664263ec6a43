"""Which weights a model folder holds."""

from __future__ import annotations

import hashlib
from pathlib import Path


def weights_digest(folder: Path) -> str:
    """Return a SHA-256, in hex, over names and contents of a model folder's configuration and weights."""
    total = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
