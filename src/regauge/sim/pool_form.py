"""What is typed for a question: pools, lengths, points and ranges. Each error names the option and shows the form.

A pool is `DEVICE[:SERVERS][,NAME=VALUE...]`, such as `mtt-s5000:12,weights=4.5,compute=0.12:0.13:0.15`:

| name | is | default |
|---|---|---|
| `span` | servers of an instance | as few as hold the model and meet the times |
| `cards`, `nics`, `nic` | of a server; the NIC's key | the catalogue's |
| `rails` | NICs that one request's KV is spread over | 1 |
| `copies` | cards of an instance that each keep a request's whole KV | 1 |
| `weights` | bits of a parameter, scales counted | 8 |
| `compute` | part of the peak rate that is reached | 0.12:0.3:0.5 |
| `memory` | part of the memory bandwidth that a decode step reaches | 0.45:0.6:0.8 |
| `overhead`, `step-overhead` | seconds of a prefill, of a decode step, beside the roofline | 0 |
| `reserve` | part of the memory that is neither weights nor KV | 0.1 |
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from math import isfinite

from regauge.errors import ConfigError
from regauge.sim.ask import Pool
from regauge.sim.model import Interval, Point, exactly
from regauge.sim.workload import Lengths


def pool(text: str, option: str, kv: str) -> Pool:
    """Read a pool. Raises ConfigError naming the part that is wrong."""
    head, *parts = (part.strip() for part in text.split(","))
    device, _, servers = head.partition(":")
    given: dict[str, object] = {"servers": _whole(servers, f"{option} {head}")} if servers else {}
    if servers and not given["servers"]:
        raise ConfigError(f"{option} {head}: give a number of servers, or none to have it found")
    for part in parts:
        name, _, value = part.partition("=")
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_FIELDS)}"
            raise ConfigError(f"{option}: no {name!r}; {hint}")
        field, read = _FIELDS[name]
        if field in given:
            raise ConfigError(f"{option}: {name} is given twice")
        given[field] = read(value, f"{option} {name}={value}")
    return Pool(device, kv=kv, **given)  # type: ignore[arg-type]


def lengths(text: str, option: str) -> Lengths:
    """Read MEAN or MEAN:P99 tokens."""
    mean, _, p99 = text.partition(":")
    try:
        return Lengths(_number(mean, option), _number(p99, option) if p99 else 0.0)
    except ConfigError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


def point(text: str, option: str) -> Point:
    """Read TOKENS:TOKENS_PER_S[:HIT], a prefill rate of one server."""
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise ConfigError(f"{option} {text!r}: give TOKENS:TOKENS_PER_S[:HIT], such as 65536:95920.5:0.9")
    rate, hit = (_number(part, f"{option} {text}") for part in (parts[1], parts[2] if len(parts) == 3 else "0"))
    found = Point(_whole(parts[0], f"{option} {text}"), rate, hit)
    if found.tokens < 1 or rate <= 0.0 or not 0.0 <= hit < 1.0:
        raise ConfigError(f"{option} {text}: tokens and rate are positive, the cached share is from 0 to below 1")
    return found


def parameters(text: str, option: str) -> tuple[float, float]:
    """Read TOTAL:ACTIVE parameters in 10^9; TOTAL alone for a dense model."""
    total, _, active = text.partition(":")
    found = _number(total, f"{option} {text}"), _number(active or total, f"{option} {text}")
    if not 0.0 < found[1] <= found[0]:
        raise ConfigError(
            f"{option} {text}: give TOTAL:ACTIVE in 10^9, such as 744:39.3, no more active ones than there are"
        )
    return found


def interval(text: str, option: str) -> Interval:
    """Read VALUE or LOW:VALUE:HIGH."""
    parts = [_number(part, option) for part in text.split(":")]
    if len(parts) == 1:
        return exactly(parts[0])
    if len(parts) != 3 or not parts[0] <= parts[1] <= parts[2]:
        raise ConfigError(f"{option}: give VALUE or LOW:VALUE:HIGH, ascending")
    return Interval(*parts)


def _number(text: str, option: str) -> float:
    try:
        found = float(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r} is no number") from error
    if not isfinite(found):
        raise ConfigError(f"{option}: {text!r} is no finite number")
    return found


def _whole(text: str, option: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"{option}: {text!r} is no whole number")
    return int(text)


def _name(text: str, option: str) -> str:
    if not text:
        raise ConfigError(f"{option}: a name is missing")
    return text


_FIELDS: Mapping[str, tuple[str, Callable[[str, str], object]]] = {
    "span": ("span", _whole),
    "cards": ("cards", _whole),
    "nic": ("nic", _name),
    "nics": ("nics", _whole),
    "rails": ("rails", _whole),
    "copies": ("copies", _whole),
    "weights": ("weight_bits", _number),
    "compute": ("compute", interval),
    "memory": ("memory", interval),
    "overhead": ("overhead_s", _number),
    "step-overhead": ("step_overhead_s", _number),
    "reserve": ("reserve", _number),
}
