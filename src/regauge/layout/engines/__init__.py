"""Layouts of vLLM's and SGLang's pools, from the flags an engineer starts them with.

The pools' tensors and orders are in `sglang` and `vllm`; what is not there is not guessed: describe it in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from regauge.errors import LayoutError, PresetError
from regauge.layout.engines import sglang, vllm
from regauge.layout.engines.flags import PLATFORMS, Engine, Flags, unknown
from regauge.layout.spec import Layout, Model

__all__ = ["PREFIX", "Engine", "Flags", "engine_layout", "engine_names", "from_engine_form", "pool_names"]

PREFIX = "engine:"
"""Starts a layout written as an engine's flags, as in `engine:sglang,pool=hnd,page=64,dtype=fp8_e4m3,tp=8,rank=3`."""

_TEXT = ("pool", "dtype", "model-dtype", "ssm-dtype", "record", "platform")
_NUMBERS = ("page", "tp", "rank", "pp", "pp-rank", "cp", "stripe", "pages", "requests")
_FIELDS = {"page": "page_size", "dtype": "kv_cache_dtype"}


def engine_names() -> tuple[str, ...]:
    """Return the engines that have presets."""
    return get_args(Engine)


def pool_names(engine: str) -> tuple[str, ...]:
    """Return the pools of an engine. Raises PresetError for an engine without presets."""
    if engine not in engine_names():
        raise unknown("engine", engine, engine_names())
    return tuple(sglang.POOLS if engine == "sglang" else vllm.POOLS)


def engine_layout(engine: str, model: Model, flags: Flags) -> Layout:
    """Return the layout of one rank's pools.

    Raises PresetError that names the flag and its choices, LayoutError for a shard or size that does not fit.
    """
    if flags.platform not in PLATFORMS:
        raise unknown("platform", flags.platform, PLATFORMS)
    if flags.record not in ("", "packed", "raw"):
        raise PresetError(f"{flags.record!r}: choose packed or raw", path="record")
    if flags.record and not any(state.kind == "indexer" for state in model.states):
        raise PresetError("only 8-bit latents of a model with an indexer have two formats", path="record")
    if engine == "sglang":
        return sglang.build(model, flags)
    if engine == "vllm":
        return vllm.build(model, flags)
    raise unknown("engine", engine, engine_names())


def from_engine_form(text: str, model: Model, *, model_dtype: str = "", ssm_dtype: str = "") -> Layout:
    """Return the layout that `engine:NAME,key=value,...` says. Raises PresetError or LayoutError naming the part."""
    name, *parts = text.removeprefix(PREFIX).split(",")
    given: dict[str, str] = {}
    for part in parts:
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals or key not in (*_TEXT, *_NUMBERS):
            known = ", ".join(f"{k}=..." for k in (*_TEXT, *_NUMBERS))
            raise PresetError(f"cannot read {part.strip()!r}; after the engine come {known}", path=text)
        if key in given:
            raise PresetError(f"{key} is given twice", path=text)
        given[key] = value
    try:
        return engine_layout(name, model, _flags({"model-dtype": model_dtype, "ssm-dtype": ssm_dtype} | given))
    except LayoutError as error:
        raise PresetError(str(error), path=text) from error


def _flags(given: Mapping[str, str]) -> Flags:
    fields: dict[str, str | int] = {}
    for key, value in given.items():
        field = _FIELDS.get(key, key.replace("-", "_"))
        fields[field] = value if key in _TEXT else _number(key, value)
    return Flags(**fields)  # type: ignore[arg-type]  # each key has its field's type


def _number(key: str, value: str) -> int:
    if not value.isdecimal() or len(value) > 12:
        raise PresetError(f"{value!r} is no number", path=key)
    return int(value)
