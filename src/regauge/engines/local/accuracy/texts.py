"""The text that accuracy is measured on, as documents of one length in tokens."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers import AutoTokenizer

from regauge import keys
from regauge.errors import ConfigError

DOCUMENTS: Final = 8
CALIBRATION: Final = 4
MAX_TEXT_BYTES: Final = 64 << 20
_CHARACTERS: Final = 12
"""More than a token of prose ever has on average, so that no more than needed is tokenised."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of documents: those that are evaluated, and others that constant scales are taken from."""

    evaluated: list[list[int]]
    calibration: list[list[int]]
    sha256: str
    """Of the whole text, in hex."""


def read(folder: Path, text: str | None, tokens: int, *, calibrate: bool) -> Texts:
    """Return documents of exactly that many tokens, at most DOCUMENTS and CALIBRATION. Raises ConfigError when there is none.

    Every source (a part of the file between two blank lines) gives its first tokens, then, while more are wanted, its next: long
    sources are cut, and what serves for calibration comes last and is not evaluated. Without a file the sources are
    the reference topics that come with Python: real English prose on every machine.
    """
    sources = _sources(text)
    wanted = DOCUMENTS + (CALIBRATION if calibrate else 0)
    found: list[list[int]] = []
    for document in _windows(folder, sources, tokens, wanted):
        found.append(document)
        if len(found) == wanted:
            break
    if len(found) < 1 + calibrate:
        need = (
            f"no document has {tokens} tokens"
            if not found
            else "only one document is left, and calibration needs its own"
        )
        raise ConfigError(f"{need}: lower --prompt-tokens and --answer-tokens, or give more text")
    held_back = min(CALIBRATION, len(found) // 2) if calibrate else 0
    cut = len(found) - held_back
    digest = hashlib.sha256("\n\n\n".join(sources).encode()).hexdigest()
    return Texts(found[:cut], found[cut:], digest)


def _sources(text: str | None) -> list[str]:
    if text is None:
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    data = keys.read_bounded(Path(text), MAX_TEXT_BYTES)
    try:
        return io.StringIO(data.decode(), newline=None).read().split("\n\n\n")  # any platform's line ends
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {text}: {error}") from error


def _windows(folder: Path, sources: list[str], tokens: int, wanted: int) -> Iterator[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    start = list(tokenizer.encode(""))[:1]  # models that begin with a token of their own begin every window so
    size = tokens - len(start)
    encoded: dict[int, list[int]] = {}
    for window in range(wanted):
        any_left = False
        for index, source in enumerate(sources):
            if index not in encoded:
                plain = " ".join(source.split())[: tokens * _CHARACTERS * wanted]
                encoded[index] = list(tokenizer.encode(plain, add_special_tokens=False, verbose=False))
            ids = encoded[index][window * size : (window + 1) * size]
            if size and len(ids) == size:
                any_left = True
                yield start + ids
        if not any_left:
            return
