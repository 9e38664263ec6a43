"""Layouts from what an engineer has at hand: a model and a short form such as `fp8_e4m3,page=64,hnd`.

Short form, comma-separated, in any order:

| part | meaning | default |
|---|---|---|
| dtype | `bf16`, `fp16`, `fp32`, `fp8_e4m3`, `fp8_e4m3fnuz`, `fp8_e5m2`, `int8` or torch's name | required, unless records hold everything |
| `page=N` | tokens per page | 16 |
| `nhd` `hnd` `kt` | page is token-head-dim; head-token-dim; as `hnd` with K transposed to head-dim-token | `nhd` |
| `split` `fused` | K and V in two tensors, or in one with a `kv` axis outside the page's own; latent and rotated part alike, or in one row | `split` |
| `layer-first` `page-first` | which of the two is outermost in memory | `layer-first` |
| `scale=none` `tensor` `head` `token_head` `block` | float32 factors of an 8-bit cache | `none` |
| `block=N` | elements per scale of `scale=block`; where they do not divide a head, the largest part that does | 128 |
| `rule=reciprocal` `divide` `divide_source` | how codes are made of values | `reciprocal` |
| `record:NAME` | pages of a packed record, for the kind of state that it holds: see `regauge.layout.records` | none |
| `state=fp32` `bf16` `fp16` | dtype of recurrent states; their convolutions' inputs have the form's dtype, bfloat16 if that is of 8 bits | `fp32` |

A part that would change nothing, such as a rule without a scale, is refused.

Every kind of state that the model keeps gets a group of its own, each array a region of its own unless fused.
An engine's flags are a form of their own, `engine:sglang,pool=hnd,page=64`: see `regauge.layout.engines`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import get_args

import msgspec

from regauge.errors import LayoutError
from regauge.layout.config import shipped_models
from regauge.layout.dtypes import ALIASES, DTYPES, canonical
from regauge.layout.engines import PREFIX, from_engine_form
from regauge.layout.engines.flags import latent_rows, local_heads
from regauge.layout.files import decode
from regauge.layout.models import (
    attention_model,
    load_described,
    load_model,
    model_from_config,
)
from regauge.layout.records import RECORDS, record_components
from regauge.layout.spec import Component, Group, Layout, Model, Per, Placement, Rule, Scale, Shard, State
from regauge.layout.validate import validate
from regauge.layout.view import check_memory

__all__ = [
    "attention_model",
    "from_short",
    "is_file",
    "load_described",
    "load_layout",
    "load_model",
    "load_named",
    "model_from_config",
    "shipped_models",
    "with_pages",
]

_PAGE_AXES = {
    "nhd": ("token head dim", "token head dim"),
    "hnd": ("head token dim", "head token dim"),
    "kt": ("head dim token", "head token dim"),
}
_RECORD = "record:"


@dataclass(frozen=True, slots=True)
class _Form:
    """A short form, read. An empty dtype: records hold everything."""

    dtype: str = ""
    page: int = 16
    order: str = "nhd"
    fused: bool = False
    outer: str = "layer page"
    per: Per | None = None
    block: int = 128
    rule: Rule = "reciprocal"
    records: tuple[str, ...] = ()
    state: str = "float32"
    words: Mapping[str, str] = field(default_factory=dict)
    """Each part as written, by its field."""

    def unheard(self, model: Model) -> Iterator[tuple[str, str]]:
        """Yield each part that would change nothing, and why."""
        if all(any(state.kind in RECORDS[name].kinds for name in self.records) for state in model.states):
            held = f"{', '.join(_RECORD + name for name in self.records)} says it of all that {model.name} keeps"
            yield from ((self.words[f], held) for f in ("order", "fused", "per", "block", "rule") if f in self.words)
        if "rule" in self.words and self.per is None:
            yield self.words["rule"], "is how codes are scaled: add a scale, such as scale=token_head"
        if "block" in self.words and self.per != "block":
            yield self.words["block"], "is the size of scale=block: add it"
        if "state" in self.words and all(state.kind != "recurrent" for state in model.states):
            yield self.words["state"], f"{model.name} keeps no recurrent state"


def from_short(
    text: str, model: Model, *, shard: Shard | None = None, pages: int = 0, requests: int | None = None
) -> Layout:
    """Build a layout of all of the model's layers from a short form. Raises LayoutError naming the part that is wrong.

    `requests`: records in the pools of recurrent states; None: as many as `pages`.
    """
    shard, form = shard or Shard(), _parse(text)
    for word, why in form.unheard(model):
        raise LayoutError(f"{word}: {why}", path=text)
    groups: list[Group] = []
    taken: set[str] = set()
    for state in model.states:
        tag = "" if not taken & set(state.arrays) else f"{state.kind}{len(groups)}_"
        taken |= set(state.arrays)
        page = 1 if state.kind == "recurrent" else form.page
        count = pages if state.kind != "recurrent" or requests is None else requests
        groups.append(Group(state.kind, state.layers, page, _components(form, state, shard, tag), count))
    unused = [name for name in form.records if not any(g.kind in RECORDS[name].kinds for g in groups)]
    if unused:
        raise LayoutError(f"{model.name} keeps nothing that {unused[0]} holds", path="record")
    return validate(Layout(model=model, groups=groups, shard=shard))


def _components(form: _Form, state: State, shard: Shard, tag: str) -> list[Component]:
    heads = local_heads(state, shard)
    for name in form.records:
        if state.kind in RECORDS[name].kinds:
            region = f"{tag}{{name}}" if RECORDS[name].kinds[0] == "attention" else f"{tag}{state.kind}"
            return record_components(name, state, page_size=form.page, heads=heads, order=form.outer, region=region)
    if not form.dtype:
        raise LayoutError(f"name a dtype for the {state.kind} layers, such as bf16", path="dtype")
    if state.kind == "recurrent":
        conv = form.dtype if DTYPES[form.dtype].itemsize > 1 else "bfloat16"
        dtypes = {name: form.state if name == "ssm_state" else conv for name in state.arrays}
        return [
            Component(name, dtypes[name], heads[name], array.dim, Placement(f"{form.outer} head dim", f"{tag}{name}"))
            for name, array in state.arrays.items()
        ]
    if form.fused and state.kind != "latent" and len(set(state.arrays.values())) != 1:
        raise LayoutError("K and V of different head dim cannot share one tensor", path="fused")
    if form.fused and state.kind == "latent":
        scales = {
            name: _scale(form, "token dim", f"{tag}{name}_scale", array.dim) for name, array in state.arrays.items()
        }
        return latent_rows(state, form.dtype, scales, form.outer, f"{tag}latent")
    components = []
    for index, (name, array) in enumerate(state.arrays.items()):
        page = _PAGE_AXES[form.order][index] if state.kind in ("attention", "window") else "token dim"
        at = Placement(f"{form.outer} {page}", f"{tag}{name}")
        if form.fused and len(state.arrays) > 1:
            at = Placement(f"{form.outer} kv {page}", f"{tag}kv")
        scale = _scale(form, page, f"{tag}{name}_scale", array.dim)
        components.append(Component(name, form.dtype, heads[name], array.dim, at, scale))
    return components


def _scale(form: _Form, page: str, region: str, dim: int) -> Scale | None:
    if form.per is None:
        return None
    if not DTYPES[form.dtype].takes_scales:
        raise LayoutError(f"{form.dtype} needs no scale", path="scale")
    if form.per in ("tensor", "head"):
        return Scale(per=form.per, values=1.0, rule=form.rule)
    inner = " ".join(axis for axis in ("token head" if form.order == "nhd" else "head token").split() if axis in page)
    if form.per == "token_head":
        return Scale("token_head", at=Placement(f"{form.outer} {inner}", region), rule=form.rule)
    at = Placement(f"{form.outer} {inner} dim", region)
    return Scale("block", at=at, block=gcd(form.block, dim), rule=form.rule)


def with_pages(layout: Layout, tokens: int, *, requests: int = 16) -> Layout:
    """Return the layout with enough pages for so many tokens, and records for so many requests, in every group that does not
    say how many it has."""
    groups = []
    for group in layout.groups:
        pages = requests if group.kind == "recurrent" else -(-tokens // group.page_size)
        groups.append(group if group.pages else msgspec.structs.replace(group, pages=pages))
    return msgspec.structs.replace(layout, groups=groups)


def load_layout(text: str, model: Model | None, *, model_dtype: str = "", ssm_dtype: str = "") -> Layout:
    """Return the layout in a file (`.toml` or `.json`), or of a short form or an engine's flags for `model`.

    `model_dtype` is what an engine's `--kv-cache-dtype auto` stands for, `ssm_dtype` what the model's config wants its
    recurrent states in.

    Raises LayoutError that names the file or part, also where elements overlap, and for a short form without a model.
    """
    if is_file(text):
        try:
            data = Path(text).read_bytes()
        except OSError as error:
            raise LayoutError(f"cannot be read: {error.strerror}", path=text) from error
        try:
            return check_memory(decode(data, format="toml" if text.endswith(".toml") else "json"))
        except LayoutError as error:
            raise LayoutError(str(error), path=text) from error
    if model is None:
        raise LayoutError("is a short form, which needs a model: add --model", path=text)
    if text.startswith(PREFIX):
        layout = from_engine_form(text, model, model_dtype=model_dtype, ssm_dtype=ssm_dtype)
    else:
        layout = from_short(text, model)
    return check_memory(layout)


def load_named(text: str, source: str) -> Layout:
    """Return the layout that a user names: a file, which says its model itself, or a form for the model of `source`.

    `source`: a Hugging Face folder, a config.json, or a shipped name. Raises LayoutError, as `load_layout`.
    """
    if is_file(text):
        return load_layout(text, None)
    told = load_described(source)
    return load_layout(text, told.model, model_dtype=told.dtype, ssm_dtype=told.state_dtype)


def is_file(text: str) -> bool:
    """Say whether a user's text names a layout file, and not a short form or an engine's flags."""
    return text.endswith((".toml", ".json"))


# -- reading -----------------------------------------------------------------------------------------------------------

_WORDS: Mapping[str, tuple[str, object]] = {
    **{word: ("order", word) for word in _PAGE_AXES},
    "split": ("fused", False),
    "fused": ("fused", True),
    "layer-first": ("outer", "layer page"),
    "page-first": ("outer", "page layer"),
}
_KNOWN = (*ALIASES, *_WORDS, "page=N", "scale=none|tensor|head|token_head|block", "block=N", "rule=RULE", "state=DTYPE",
          "record:NAME")  # fmt: skip
_MOST = {"page": 65_536, "block": 65_536}


def _parse(text: str) -> _Form:
    given: dict[str, object] = {}
    words: dict[str, str] = {}
    records: list[str] = []
    for raw in text.split(","):
        part = raw.strip().lower()
        if part.startswith(_RECORD):
            records.append(_record(part.removeprefix(_RECORD)))
            continue
        name, value = _read(part, text)
        if name in given:
            raise LayoutError(f"{'scale' if name == 'per' else name} is given twice", path=text)
        given[name], words[name] = value, part
    if "dtype" not in given and not records:
        raise LayoutError("a short form names a dtype, such as bf16 or fp8_e4m3", path=text)
    return msgspec.convert({**given, "records": records, "words": words}, _Form)


def _read(part: str, text: str) -> tuple[str, object]:
    """Return the field of a part and its value."""
    key, _, value = part.partition("=")
    if dtype := canonical(part):
        return "dtype", dtype
    if part in _WORDS:
        return _WORDS[part]
    if key in _MOST:
        if not value.isdecimal() or len(value) > 9 or not 1 <= int(value) <= _MOST[key]:
            raise LayoutError(
                f"{key}={value} is not a number of {'tokens' if key == 'page' else 'elements'}", path=text
            )
        return key, int(value)
    if key == "scale":
        return "per", _choice(key, value.replace("-", "_"), (*get_args(Per), "none"))
    if key == "rule":
        return key, _choice(key, value, get_args(Rule))
    if key == "state":
        return key, _choice(key, canonical(value) or value, ("float32", "bfloat16", "float16"))
    raise LayoutError(f"cannot read {part!r}; the parts of a short form are {', '.join(_KNOWN)}", path=text)


def _choice(key: str, value: str, choices: tuple[str, ...]) -> str | None:
    if value not in choices:
        raise LayoutError(f"{key}={value}: choose {', '.join(choices)}", path=key)
    return None if value == "none" else value


def _record(name: str) -> str:
    if name not in RECORDS:
        raise LayoutError(f"no record {name!r}; choose {', '.join(RECORDS)}", path="record")
    return name
