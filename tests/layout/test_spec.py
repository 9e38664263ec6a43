"""A layout is data: it survives a file, and what is wrong with it is named by field."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.errors import LayoutError
from regauge.layout.files import decode, encode
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import (
    Array,
    Layout,
    Region,
    Rope,
    Scale,
    Shard,
    format_layers,
    parse_layers,
    parse_order,
    scale_table,
)
from regauge.layout.validate import validate
from strategies import EIGHT_BIT, FLOATS, layouts, models

MODEL = attention_model("m", 4, Array(4, 8), rope=Rope(10_000.0, 8))


@given(data=st.data(), form=st.sampled_from(["toml", "json"]))
@settings(max_examples=60, deadline=None)
def test_a_layout_survives_a_file(data: st.DataObject, form: str) -> None:
    layout = data.draw(layouts(data.draw(models()), (*FLOATS, *EIGHT_BIT)))
    assert decode(encode(layout, format=form), format=form) == layout


@pytest.mark.parametrize("form", ["toml", "json"])
@given(text=st.binary(max_size=200))
def test_any_bytes_give_a_layout_or_a_layout_error(form: str, text: bytes) -> None:
    with pytest.raises(LayoutError):
        decode(text, format=form)


def test_an_unknown_field_is_refused_with_its_path() -> None:
    text = encode(from_short("bf16", MODEL), format="toml").decode().replace("page_size", "pagesize")
    with pytest.raises(LayoutError, match=r"`pagesize`.*\$\.groups\[0\]"):
        decode(text.encode(), format="toml")


def broken(path: str, value: object) -> Layout:
    """A sound layout with one field changed, through its plain form."""
    plain = msgspec.to_builtins(from_short("fp8_e4m3,page=4,scale=head", MODEL, pages=2))
    *parents, last = path.split(".")
    target = plain
    for step in parents:
        target = target[int(step) if step.isdigit() else step]
    target[int(last) if last.isdigit() else last] = value
    return msgspec.convert(plain, Layout)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.num_layers", 0, "model.num_layers: 0 is not positive"),
        ("model.num_layers", 3, r"model.states\[0\].layers: layer 3 of a model with 3"),
        ("model.states.0.arrays.v.dim", 16, r"groups\[0\].components\[1\].dim: 8, but the model's v has 16"),
        ("model.states.0.layers", "0-2", r"groups\[0\].layers: layer 3 keeps another attention state than layer 0, or none"),
        ("model.states.0.layers", "0-4", r"model.states\[0\].layers: layer 4 of a model with 4"),
        ("model.states.0.kind", "latent", r"groups\[0\].kind: .*layer 0 of m keeps no attention state"),
        ("model.states.0.kind", "window", r"model.states\[0\].window: a window state, and no other, says how many tokens"),
        ("model.states.0.arrays", {}, r"model.states\[0\].arrays: name its arrays"),
        ("model.states", [], "model.states: say what its layers keep"),
        ("groups.0.components.1.name", "w", r"components\[1\].name: the model's attention state has no array 'w'; it has k, v"),
        ("groups.0.components.1.first_head", 1, r"first_head: 4 heads from 1 on, but the model's v has 4"),
        ("shard", {"cp_rank": 2, "cp_size": 2}, "shard.cp_rank: rank 2 of 2"),
        ("shard", {"cp_stripe": 0}, "shard.cp_stripe: 0 is not positive"),
        ("shard", {"tp_rank": 2, "tp_size": 2}, "shard.tp_rank: rank 2 of 2"),
        ("shard", {"tp_size": 3}, "shard.tp_size: 4 heads of k do not divide over 3 ranks"),
        ("shard", {"tp_size": 2}, "components.*heads: 4 heads, but rank 0 of 2 holds 2 of the model's 4"),
        ("groups", [], "groups: a layout needs at least one group"),
        ("groups.0.page_size", 0, "page_size: 0 is not positive"),
        ("groups.0.pages", -1, "pages: -1 pages"),
        ("groups.0.layers", "3-1", r"^groups\[0\].layers: '3-1' is not an ascending"),
        ("groups.0.layers", "a", r"^groups\[0\].layers: 'a' is not a list of layers"),
        ("model.states.0.layers", "a", r"^model.states\[0\].layers: 'a' is not a list of layers"),
        ("groups.0.components.1.name", "k", "must be given and differ"),
        ("groups.0.components.0.dtype", "fp7", "unknown dtype 'fp7'; known are float32"),
        ("groups.0.components.0.at.order", "layer page token dim", "lacks head"),
        ("groups.0.components.0.at.order", "page token head dim", "either as an axis of the order or as"),
        ("groups.0.components.0.at.order", "layer page token head dim dim:3", "dim of size 8 cannot be split by 3"),
        ("groups.0.components.0.at.order", "layer page token head dim dim", "named twice"),
        ("groups.0.components.0.at.order", "layer page token head dim token:8", "token of size 4 cannot be split by 8"),
        ("groups.0.components.0.at.order", "layer page token head dim:4 dim", "outer part is missing"),
        ("groups.0.components.0.at.order", "layer page:2 token head dim", "can be split"),
        ("groups.0.components.0.at.order", "layer page tokens head dim", "unknown axis 'tokens'"),
        ("groups.0.components.0.at.order", "layer token head dim", "lacks the page"),
        ("groups.0.components.0.at.offset", -8, "offset: -8 is no offset"),
        ("groups.0.components.0.at.offset", 1 << 60, "is no offset"),
        ("groups.0.page_size", 1 << 30, "page_size: 1073741824 exceeds 1048576"),
        ("groups.0.components.0.heads", 1 << 20, "heads: 1048576 exceeds 65536"),
        ("groups.0.components.0.at.strides", {"page": 1 << 60}, "exceeds"),
        ("groups.0.components.0.at.strides", {"lane": 4}, "'lane' is no axis"),
        ("groups.0.components.0.at.strides", {"page": 0}, "strides.page: 0 is not positive"),
        ("groups.0.components.0.scale", {"per": "tensor"}, "scale: give either"),
        ("groups.0.components.0.scale", {"per": "token_head", "values": 1.0}, "say where they are stored"),
        ("groups.0.components.0.scale", {"per": "tensor", "values": 1.0, "dtype": "float8_e8m0fnu"},
         "scale.dtype: float8_e8m0fnu is of stored scales: constant ones are float32"),
        ("groups.0.components.0.scale", {"per": "head", "values": [1.0]}, "1 values for 4 layers"),
        ("groups.0.components.0.scale", {"per": "tensor", "values": [[1.0, 1.0, 1.0, 2.0]] * 4}, "per tensor"),
        ("groups.0.components.0.scale", {"per": "tensor", "values": 0.0}, "finite and positive"),
        ("groups.0.components.0.scale", {"per": "head", "at": {"order": "layer page token head"}}, "are per token_head"),
        ("groups.0.components.0.scale", {"per": "block", "block": 3, "at": {"order": "layer page token head dim"}}, "blocks of 3"),
        ("groups.0.components.0.scale", {"per": "token_head", "at": {"order": "layer page token head"}, "dtype": "int8"},
         "scale.dtype: unknown dtype 'int8'"),
        ("groups.0.components.0.scale", {"per": "token_head", "at": {"order": "layer page token head"}, "dtype": "float8_e8m0fnu"},
         "set pow2"),
        ("groups.0.components.0.scale", {"per": "token_head", "at": {"order": "layer page token head"}, "floor": 1e-40},
         "scale.floor: 1e-40 is not between"),
        ("groups.0.components.0.scale", {"per": "token_head", "at": {"order": "layer page token head dim"}}, "no dim axis"),
        ("regions", [{"name": "k", "nbytes": 1}, {"name": "k", "nbytes": 2}], "two regions have the same name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(path: str, value: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        validate(broken(path, value))


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20, unique=True))
def test_layer_lists_read_back(ids: list[int]) -> None:
    assert parse_layers(format_layers(tuple(ids))) == tuple(ids)
    step = format_layers(tuple(range(3, 60, 4)))
    assert step == "3-59:4"
    assert parse_layers("0-2, 7") == (0, 1, 2, 7)


def test_an_order_names_each_axis_once_outermost_first() -> None:
    assert parse_order("page head dim token dim:8") == (
        ("page", None), ("head", None), ("dim", None), ("token", None), ("dim", 8))  # fmt: skip


def test_the_digest_tells_layouts_apart_but_not_addresses() -> None:
    a = from_short("bf16", MODEL, pages=2)
    bound = msgspec.structs.replace(a, regions=[Region("k", 64, base=4096), Region("v", 64, base=8192)])
    moved = msgspec.structs.replace(a, regions=[Region("k", 64, base=1), Region("v", 64, base=2)])
    assert bound.digest() == moved.digest() != a.digest()
    assert from_short("bf16", MODEL).digest() != from_short("fp16", MODEL).digest()


@pytest.mark.parametrize(("size", "rank", "heads"), [(1, 0, [0, 1, 2, 3]), (2, 1, [2, 3]), (4, 2, [2]), (8, 5, [2])])
def test_ranks_share_or_replicate_heads(size: int, rank: int, heads: list[int]) -> None:
    assert list(Shard(rank, size).heads(4)) == heads


def test_constant_scales_of_a_peer_cost_bounded_memory() -> None:
    with pytest.raises(LayoutError, match="100000 layers of 65536 heads; at most 1048576 constant scales"):
        scale_table(Scale("tensor", values=1.0), 100_000, 65_536)


def test_a_default_that_is_written_out_changes_no_digest() -> None:
    plain = json.loads(encode(from_short("fp8,scale=token_head", MODEL), format="json"))
    for component in plain["groups"][0]["components"]:
        component["scale"] |= {"floor": 2.0**-126, "pow2": False, "dtype": "float32"}
    written = decode(json.dumps(plain).encode(), format="json")
    assert written.digest() == from_short("fp8,scale=token_head", MODEL).digest()
    assert written.model.identity() == MODEL.identity()
