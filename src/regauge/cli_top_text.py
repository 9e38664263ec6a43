"""Figures of `regauge top`, as people read them. Pure."""

from __future__ import annotations


def per_second(rate: float | None) -> str:
    """Return bytes per second; a dash where nothing says how many."""
    return "-" if rate is None else f"{size(rate)}/s"


def size(count: float) -> str:
    """Return bytes in a unit that leaves at most four digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Return seconds in at most two units."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"
