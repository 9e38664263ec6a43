"""The transport over `careless_library`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from regauge.move.library import wire
from regauge.move.library.carrier import environment
from regauge.move.library.transport import CAPS, LibraryTransport
from regauge.move.tls import Tls
from regauge.move.transport import Caps


class CarelessTransport(LibraryTransport):
    kind: ClassVar[str] = "careless"
    caps: ClassVar[Caps] = CAPS

    def __init__(
        self, *, key: bytes, name: str, host: str = "127.0.0.1", tls: Tls | None = None, peers_per_carrier: int = 1
    ) -> None:
        here = {"PYTHONPATH": str(Path(__file__).parent)}
        super().__init__(
            key=key, name=name, host=host, port=0, tls=tls, request=wire.Open("careless_library", host, "tcp", ()),
            environment=environment(here, {}), peers_per_carrier=peers_per_carrier,
        )  # fmt: skip
