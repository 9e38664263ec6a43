"""Key files: made once, readable by their owner alone, and nothing else is taken for one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from regauge import keys
from regauge.errors import ConfigError


def test_a_new_pair_signs_and_verifies(tmp_path: Path) -> None:
    public = keys.generate(tmp_path / "key.pem")
    assert public == tmp_path / "key.pem.pub"
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("key.pem", "key.pem.pub")] == [0o600, 0o644]
    keys.load_public(public).verify(keys.load_private(tmp_path / "key.pem").sign(b"x"), b"x")


def test_openssl_reads_it(tmp_path: Path) -> None:
    keys.generate(tmp_path / "key.pem")
    shown = subprocess.run(
        ["openssl", "pkey", "-in", str(tmp_path / "key.pem"), "-pubout"], capture_output=True, check=True
    )
    assert shown.stdout == (tmp_path / "key.pem.pub").read_bytes()


@pytest.mark.parametrize("name", ["key.pem", "key.pem.pub"])
def test_a_key_is_never_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"{name}: exists"):
        keys.generate(tmp_path / "key.pem")
    assert (tmp_path / name).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/key\.pem: No such file"):
        keys.generate(tmp_path / "none" / "key.pem")


def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keys.generate(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o640)
    with pytest.raises(ConfigError, match="others can read this private key: chmod 600 it"):
        keys.load_private(tmp_path / "key.pem")


def test_what_is_no_ed25519_key_is_refused(tmp_path: Path) -> None:
    public = keys.generate(tmp_path / "key.pem")
    rsa = generate_private_key(65537, 2048)
    path = tmp_path / "other.pem"
    path.write_bytes(
        rsa.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        keys.load_private(path)
    path.write_bytes(
        rsa.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        keys.load_public(path)
    with pytest.raises(ConfigError, match=r"no public key in PEM; give the file that ends in \.pub"):
        keys.load_public(tmp_path / "key.pem")
    public.chmod(0o600)
    with pytest.raises(ConfigError, match="no unencrypted private key"):
        keys.load_private(public)
    path.write_bytes(b"x" * (keys.MAX_KEY_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 16384 bytes"):
        keys.load_public(path)
    with pytest.raises(ConfigError, match="none: No such file"):
        keys.load_public(tmp_path / "none")
