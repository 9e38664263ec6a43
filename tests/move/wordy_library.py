"""`careless_library` with more to say of itself than a message to its worker holds."""

from __future__ import annotations

import careless_library

from regauge.move.library import wire


class Engine(careless_library.Engine):
    def describe(self) -> bytes:
        return bytes(wire.MAX_MESSAGE)
