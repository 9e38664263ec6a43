"""Records: written, read, signed; what is not one is refused with its field."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quality_records import HEADS, KEY, LAYERS, MODEL, OTHER_KEY, per_head, record_of, result, table
from regauge.errors import ConfigError
from regauge.layout.presets import from_short
from regauge.layout.spec import Shard
from regauge.plan import check, quality

PLAIN = from_short("bf16", MODEL)
RECORD = record_of(PLAIN, per_head())
SIGNED = quality.sign(RECORD, KEY)


def test_a_record_reads_back_and_its_signature_holds() -> None:
    data = quality.encode(SIGNED)
    back = quality.decode(data)
    assert back == SIGNED
    assert quality.verify(back, KEY.public_key())
    assert not quality.verify(back, OTHER_KEY.public_key())


def test_a_record_names_dtypes_scheme_rule_and_every_scale() -> None:
    k, v = RECORD.conversions
    assert (k.component, v.component, k.layers, k.heads) == ("k", "v", f"0-{LAYERS - 1}", HEADS)
    assert str(k.prefill) == "bfloat16 without scale"
    assert str(k.decode) == "float8_e4m3fn with a scale per head (constant, rule reciprocal)"
    assert k.decode.scale is not None
    assert k.decode.scale.values == table()


def test_white_space_and_order_of_a_file_do_not_matter() -> None:
    plain = json.loads(quality.encode(SIGNED))
    plain["record"] = dict(reversed(plain["record"].items()))
    assert quality.verify(quality.decode(json.dumps(plain, indent=7).encode()), KEY.public_key())


def leaves(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(value, dict):
        return [x for key, inner in value.items() for x in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [x for i, inner in enumerate(value) for x in leaves(inner, (*path, i))]
    return [path]


PLACES = leaves(json.loads(quality.encode(SIGNED))["record"])


@given(st.sampled_from(PLACES), st.data())
def test_any_changed_value_breaks_the_signature(place: tuple[str | int, ...], data: st.DataObject) -> None:
    plain = json.loads(quality.encode(SIGNED))
    at = plain["record"]
    for step in place[:-1]:
        at = at[step]
    old = at[place[-1]]
    if isinstance(old, float):
        at[place[-1]] = data.draw(st.floats(1e-6, 1e3).filter(lambda x: x != old))
    elif isinstance(old, bool) or old is None:
        at[place[-1]] = not old
    elif isinstance(old, int):
        at[place[-1]] = old + data.draw(st.integers(1, 5))
    else:
        at[place[-1]] = old + "x"
    try:
        changed = quality.decode(json.dumps(plain).encode())
    except ConfigError:
        return  # no longer a record at all
    assert not quality.verify(changed, KEY.public_key())


@pytest.mark.parametrize("change", [{"signature": "00" * 64}, {"signature": "zz"}, {"signature": "00"}])
def test_a_signature_that_is_none_does_not_hold(change: dict[str, str]) -> None:
    assert not quality.verify(msgspec.structs.replace(SIGNED, **change), KEY.public_key())


def broken(**change: object) -> bytes:
    plain = json.loads(quality.encode(SIGNED))
    plain["record"] |= change
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "r.json: not a quality record: Input data was truncated"),
        (b"\xff\xfe", "r.json: not a quality record"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `record`"),
        (b'{"record": {}}', "missing required field `model` - at `$.record`"),
        (b" " * (quality.MAX_BYTES + 1), f"larger than {quality.MAX_BYTES} bytes"),
        (broken(more=1), "unknown field `more` - at `$.record`"),
        (broken(format=2), "Invalid enum value 2 - at `$.record.format`"),
        (broken(version=None), "Expected `str`, got `null` - at `$.record.version`"),
    ],
)
def test_what_is_no_record_is_refused_with_its_field(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        quality.decode(data, "r.json")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", "0-99999999", "is not an ascending range of layers"),
        ("layers", "0-4", "6 values for 5 layers"),
        ("heads", 3, "4 values for 3 heads"),
        ("heads", 0, "0 heads"),
        ("kind", "other", "Invalid enum value 'other'"),
    ],
)
def test_scales_that_do_not_fit_their_layers_are_refused(field: str, value: object, message: str) -> None:
    plain = json.loads(quality.encode(SIGNED))
    plain["record"]["conversions"][0][field] = value
    with pytest.raises(ConfigError, match=message):
        quality.decode(json.dumps(plain).encode())


@pytest.mark.parametrize("values", [0.5, [0.5] * LAYERS, None])
def test_constants_must_be_a_list_per_layer(values: object) -> None:
    plain = json.loads(quality.encode(SIGNED))
    plain["record"]["conversions"][0]["decode"]["scale"]["values"] = values
    with pytest.raises(ConfigError, match="one list of heads per layer"):
        quality.decode(json.dumps(plain).encode())


def test_a_small_file_does_not_ask_for_much_memory() -> None:
    plain = json.loads(quality.encode(SIGNED))
    first = plain["record"]["conversions"][0]
    first["decode"] = first["prefill"]
    plain["record"]["conversions"] = [first | {"layers": ",".join(["0-100000"] * 10_000)}]
    with pytest.raises(ConfigError, match="names a layer twice"):
        quality.decode(json.dumps(plain).encode())
    plain["record"]["conversions"] = [first | {"layers": "0-100000", "component": f"c{i}"} for i in range(100)]
    with pytest.raises(ConfigError, match="more than 131072 layers and components"):
        quality.decode(json.dumps(plain).encode())
    plain["record"]["conversions"] = [first, first]
    with pytest.raises(ConfigError, match="k of layer 0 is named twice"):
        quality.decode(json.dumps(plain).encode())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_figures_that_are_not_finite_are_neither_signed_nor_written(value: float) -> None:
    bad = msgspec.structs.replace(RECORD, result=result(perplexity=value))
    with pytest.raises(ConfigError, match="not finite"):
        quality.sign(bad, KEY)
    with pytest.raises(ConfigError, match="not finite"):
        quality.encode(quality.Signed(bad))


def test_a_record_is_of_all_heads() -> None:
    shard = Shard(tp_rank=1, tp_size=2)
    pair = from_short("bf16", MODEL, shard=shard), from_short("fp8_e4m3", MODEL, shard=shard)
    with pytest.raises(ConfigError, match="all heads of a model: give layouts without tp"):
        quality.conversions(*pair, check(*pair))


def test_constants_of_one_are_no_scale() -> None:
    (k, _) = quality.conversions(
        PLAIN, from_short("fp8_e4m3,scale=head", MODEL), check(PLAIN, from_short("fp8_e4m3", MODEL))
    )
    assert k.decode == quality.Coding("float8_e4m3fn", None, stored=False)
