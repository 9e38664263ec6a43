"""The signing keys of a deployment's processes, and the folder of those that it trusts (`meter.receipt.load_trust`).

    KEYS/NAME.key                    private, its owner's alone
    KEYS/trust/gateways/NAME.pub
    KEYS/trust/workers/NAME.pub

A key that is there is used, and never replaced. Where another public key lies under a name, it stays trusted as one more of that name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from regauge import keys
from regauge.errors import ConfigError

TRUST: Final = "trust"


def prepare(folder: Path, gateways: Iterable[str], workers: Iterable[str]) -> dict[str, Path]:
    """Make what lacks; return the private key files by name. Raises ConfigError."""
    found = {}
    for kind, names in (("gateways", gateways), ("workers", workers)):
        trusted = folder / TRUST / kind
        try:
            trusted.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in names:
                found[name] = folder / f"{name}.key"
                if not found[name].exists():
                    keys.generate(found[name]).unlink()  # its place is under `trust`
                _trust(trusted, name, keys.public_pem(keys.load_private(found[name]).public_key()))
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}; meter.keys names the folder of signing keys") from error
    return found


def _trust(folder: Path, name: str, pem: bytes) -> None:
    path = folder / f"{name}.pub"
    if path.exists():
        known = path.read_bytes()
        if known == pem:
            return
        path.replace(folder / f"{name}@{hashlib.sha256(known).hexdigest()[:16]}.pub")
    path.write_bytes(pem)
