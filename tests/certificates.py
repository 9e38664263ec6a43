"""Certificates for tests: an authority and workers that it signs, as PEM files."""

from __future__ import annotations

import datetime
import functools
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from regauge.move.tls import Tls

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


class Authority:
    """Signs certificates; everything is written into `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(self._name, self._key, ca=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, worker: str, *, days: int = 36_500) -> tuple[Path, Path]:
        """Return the files of a worker's certificate and key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, worker)])
        certificate = self._folder / f"{worker}.pem"
        certificate.write_bytes(self._sign(name, key, days=days).public_bytes(serialization.Encoding.PEM))
        secret = self._folder / f"{worker}.key"
        secret.touch(0o600)
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, secret

    def tls(self, worker: str, *, days: int = 36_500) -> Tls:
        """Return what a worker loads."""
        return Tls.load(*self.issue(worker, days=days), self.path)

    def _sign(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool = False, days: int = 36_500
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(START)
            .not_valid_after(START + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        return builder.sign(self._key, hashes.SHA256())


@functools.cache
def shared_tls() -> Tls:
    """Return one worker's certificate for all tests that want any."""
    with tempfile.TemporaryDirectory() as folder:
        return Authority(Path(folder)).tls("worker")
