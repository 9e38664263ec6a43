"""Bytes of chunks that have landed, over all links of one side since it started. Belongs to the links' event loop."""

from __future__ import annotations

from regauge.move import messages as m
from regauge.move.channel import Channel


class Moved:
    """Counts chunks, also those of transfers that failed then, and those that were written twice: each as often as it crossed."""

    def __init__(self) -> None:
        self.by_path: dict[str, int] = {}
        """Landed, by the path of the pair of layouts."""
        self.far = 0
        """Of them to or from other hosts, over a network."""
        self.flying = 0
        """At most so many bytes of these are on their way and not counted."""
        self.resent = self.resumed = 0
        """Of links that are gone: as the channel counts."""

    def begin(self, most: int, *, far: bool) -> None:
        """A write of at most so many bytes begins."""
        self.flying += most if far else 0

    def end(self, most: int, *, far: bool) -> None:
        """It has ended, in whichever way."""
        self.flying -= most if far else 0

    def landed(self, nbytes: int, path: str, *, far: bool) -> None:
        """A chunk has landed."""
        self.by_path[path] = self.by_path.get(path, 0) + nbytes
        self.far += nbytes if far else 0

    def heard(self, message: m.AnyMessage, path: str, *, far: bool) -> None:
        """A word of the peer has been taken: maybe that a chunk has landed."""
        if isinstance(message, m.Written):
            self.landed(message.nbytes, path, far=far)

    def past(self, channel: Channel) -> None:
        """A link is gone."""
        self.resent += channel.resent
        self.resumed += channel.resumed
