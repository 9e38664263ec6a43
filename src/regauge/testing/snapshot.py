"""Copies of a simulated cluster, and keys that tell its states apart: what an exhaustive search needs.

`copy.deepcopy` does the same in many times as long.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import msgspec

from regauge.move.outleg import LinkTerms
from regauge.move.pages import PagePool
from regauge.move.protocol import Part
from regauge.move.receiver import Receiver
from regauge.move.sender import Sender
from regauge.testing.shape import Placed
from regauge.testing.world import World

APART = frozenset({"setup", "places", "pairs", "stats", "last", "_offer_s", "_deadline_s", "_lease_s", "_resume_s"})
"""Attributes that are no state: the same in every state of a search, or for the eye."""
_SAME = frozenset({LinkTerms, Part, Placed})
"""What is the same in every state, wherever it is."""
_ATOMS = frozenset({int, str, float, bool, bytes, type(None)})


def copy(world: World) -> World:
    """Return a world that goes its own way from here."""
    new = _copy(world, {})
    assert isinstance(new, World)  # noqa: S101  # as its argument
    new.stats, new.last = Counter(), deque(maxlen=1)
    return new


def key(world: World) -> int:
    """Return a number that is the same for states that behave alike: 64 bits, so that a million states are told apart."""
    return hash(_key(world))


def _copy(x: Any, memo: dict[int, Any]) -> Any:
    kind: Any = type(x)
    if kind in _ATOMS or kind is tuple or _frozen(kind):
        return x  # tuples hold nothing that changes
    if (known := memo.get(id(x))) is not None:
        return known  # a chunk in flight is also in its leg's list
    new: Any
    if kind is list:
        new = x.copy() if not x or type(x[0]) in _ATOMS else [_copy(value, memo) for value in x]
    elif kind is dict or kind is OrderedDict:
        new = kind([(name, _copy(value, memo)) for name, value in x.items()])
    elif kind is deque:
        new = deque([_copy(value, memo) for value in x], x.maxlen)
    elif kind is set:
        new = set(x)
    else:
        new = kind.__new__(kind)
        for name, apart in _names(kind) or _attributes(x):
            value = getattr(x, name)
            setattr(new, name, value if apart else _copy(value, memo))
    memo[id(x)] = new
    return new


def _key(x: Any) -> Any:
    kind: Any = type(x)
    if kind in _ATOMS:
        return x
    if kind is list or kind is tuple or kind is deque:
        return tuple(x) if kind is list and x and type(x[0]) is int else tuple([_key(value) for value in x])
    if kind is dict or kind is OrderedDict:
        return tuple([(name, _key(value)) for name, value in x.items()])
    if kind is set:
        return frozenset(x)
    if kind in _SAME:
        return None
    if isinstance(x, msgspec.Struct):
        return kind, msgspec.msgpack.encode(x)
    return tuple([_key(getattr(x, name)) for name, apart in _names(kind) or _attributes(x) if not apart])


@cache
def _names(kind: type) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a dataclass and whether they are apart; empty for a class that keeps its state in `__dict__`."""
    if is_dataclass(kind):
        return tuple((f.name, f.name in APART) for f in fields(kind))
    if not issubclass(kind, World | PagePool | Sender | Receiver):
        raise TypeError(f"{kind.__name__} cannot be copied: teach regauge.testing.snapshot about it")
    return ()


def _attributes(x: Any) -> list[tuple[str, bool]]:
    return [(name, name in APART) for name in vars(x)]


@cache
def _frozen(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return issubclass(kind, msgspec.Struct) or bool(parameters and parameters.frozen)
