"""Shared by the benchmarks: options, a clock, a table, JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

OUT = Path(__file__).parent / "out"


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and its threads so far (clock_getcpuclockid(3): the id is made from the pid)."""
    return time.clock_gettime((~pid << 3) | 2)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows with the same keys as an aligned table: numbers to the right, floats with two decimals."""
    if not rows:
        return
    columns = list(rows[0])
    text = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in text)) for i, c in enumerate(columns)]
    right = [isinstance(v, int | float) and not isinstance(v, bool) for v in rows[0].values()]
    for line in (columns, ["-" * w for w in widths], *text):
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        print("  ".join(cells).rstrip())


def write_json(name: str, data: object) -> Path:
    """Write `data` to bench/out/<name>.json and return the path."""
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(data, indent=2) + "\n")
    return path


def arguments(doc: str | None, *, rounds: int, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options that the benches of kernels share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help=f"also write bench/out/{name}.json")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    return parser
