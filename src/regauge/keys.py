"""Ed25519 keys in files: PEM as openssl writes it, PKCS #8 for the private key, SubjectPublicKeyInfo for the public one."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from regauge.errors import ConfigError

MAX_KEY_BYTES: Final = 16_384


def generate(path: Path) -> Path:
    """Write a new private key (mode 0600) to `path` and its public key beside it; return the latter's path.

    Raises ConfigError where one of the two files exists: a key is never overwritten, since what it signed would become worthless.
    """
    public = path.with_name(path.name + ".pub")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    if public.exists():
        raise ConfigError(f"{public}: exists; choose another name for the new key")
    _create(path, private, 0o600)
    _create(public, public_pem(key.public_key()), 0o644)
    return public


def public_pem(key: Ed25519PublicKey) -> bytes:
    """Return a public key as it is written to a file."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def load_private(path: Path) -> Ed25519PrivateKey:
    """Read a private key. Raises ConfigError, also for a file that others than its owner can read."""
    data = read_private(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: no unencrypted private key in PEM: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: not an Ed25519 key; make one with `regauge bench keygen`")
    return key


def load_public(path: Path) -> Ed25519PublicKey:
    """Read a public key. Raises ConfigError."""
    data = read_bounded(path, MAX_KEY_BYTES)
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: no public key in PEM; give the file that ends in .pub") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path}: not an Ed25519 key; make one with `regauge bench keygen`")
    return key


def sign(key: Ed25519PrivateKey, context: bytes, plain: bytes) -> str:
    """Return the signature of `plain`, in hex; `context` names its kind, so that nothing signed is taken for something else."""
    return key.sign(context + plain).hex()


def verify(key: Ed25519PublicKey, context: bytes, plain: bytes, signature: str) -> bool:
    """Say whether `signature` is what `sign` gives for exactly this, with that public key's private one."""
    try:
        key.verify(bytes.fromhex(signature), context + plain)
    except (InvalidSignature, ValueError):
        return False
    return True


def read_private(path: Path) -> bytes:
    """Read a file that holds a secret. Raises ConfigError, also for one that others than its owner can read."""
    data = read_bounded(path, MAX_KEY_BYTES)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path}: others can read this private key: chmod 600 it")
    return data


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes. Raises ConfigError for a larger one, and for one that cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if len(data) > limit:
        raise ConfigError(f"{path}: larger than {limit} bytes, which is the most that is read")
    return data


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
    except FileExistsError as error:
        raise ConfigError(f"{path}: exists; choose another name for the new key") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
