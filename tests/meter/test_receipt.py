"""A receipt that contradicts itself is none; a signature is of exactly one receipt and one name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meter_cases import KEYS, request, requests, signed, trust
from regauge import keys
from regauge.errors import ConfigError, ReceiptError
from regauge.meter import receipt as receipts
from regauge.meter.receipt import CONTEXT, MAX_COUNT, Receipt, Side, Signed, Trust, canonical, decode, encode, sign


@given(requests())
def test_what_is_written_is_read_back_and_verified(made: dict[Side, Receipt]) -> None:
    for receipt in made.values():
        back = decode(encode(signed(receipt)))
        assert back.receipt == receipt
        assert trust().check(back).receipt == receipt


@given(requests(), st.data())
def test_cached_and_computed_are_the_prompt_in_every_receipt(made: dict[Side, Receipt], data: st.DataObject) -> None:
    receipt = made[data.draw(st.sampled_from(("gateway", "prefill", "decode")))]
    field = data.draw(st.sampled_from(("prompt", "cached", "computed")))
    wrong = data.draw(st.integers(0, 1 << 24).filter(lambda n: n != getattr(receipt, field)))
    with pytest.raises(ReceiptError, match=r"cached \+ computed = prompt|transferred|converted"):
        replace(receipt, **{field: wrong})


@pytest.mark.parametrize(
    ("side", "change", "said"),
    [
        ("decode", {"computed": None}, "cached, computed: say both"),
        ("gateway", {"generated": None}, "generated: gateway must say it"),
        ("gateway", {"cached": None, "computed": None}, "cached: gateway must say it"),
        ("prefill", {"transferred": None}, "transferred: prefill must say it"),
        ("decode", {"wire_bytes": None}, "wire_bytes: decode must say it"),
        ("gateway", {"tenant": ""}, "tenant: gateway must say it"),
        ("decode", {"digest": ""}, "digest: decode must say it"),
        ("prefill", {"by": "d-0"}, "prefill: is 'p-0', but 'd-0' says so of itself"),
        ("decode", {"transferred": 1_001}, "transferred: 1001 is more than the prompt, 1000"),
        ("decode", {"transferred": 5}, "converted: 1000 is more than what was transferred, 5"),
        ("gateway", {"ended_us": 5}, "began_us, ended_us: "),
        ("gateway", {"began_us": -1}, "began_us, ended_us: "),
        ("gateway", {"generated": -1}, f"generated: -1 is not from 0 to {MAX_COUNT}"),
        ("gateway", {"generated": MAX_COUNT + 1}, "generated: "),
        ("decode", {"wire_bytes": {"CONVERT": 0}}, "wire_bytes.CONVERT: 0 is not from 1"),
        ("gateway", {"tenant": "a\nb"}, "tenant: give at most 256 printable"),
        ("gateway", {"tenant": "a" * 257}, "tenant: give at most 256 printable"),
        ("gateway", {"tenant": "\ud800"}, "tenant: give at most 256 printable"),
        ("gateway", {"model": ""}, "model: must not be empty"),
    ],
)
def test_a_contradiction_is_refused_where_it_is_made_and_where_it_is_read(
    side: Side, change: dict[str, Any], said: str
) -> None:
    receipt = request()[side]
    with pytest.raises(ReceiptError) as caught:
        replace(receipt, **change)
    assert str(caught.value).startswith(said)
    if "\\ud800" not in str(change):
        plain = msgspec.to_builtins(signed(receipt))
        plain["receipt"] |= change
        with pytest.raises(ReceiptError, match=r"^file\.jsonl:7: "):
            decode(msgspec.json.encode(plain), "file.jsonl:7")


def test_a_request_that_ended_early_may_have_computed_less_than_its_prompt() -> None:
    gateway = request()["gateway"]
    for outcome in ("failed", "cancelled"):
        assert replace(gateway, outcome=outcome, generated=0, computed=10).computed == 10
    with pytest.raises(ReceiptError, match="cached"):  # its first token came, so the prompt was there
        replace(gateway, outcome="cancelled", generated=1, computed=10)
    with pytest.raises(ReceiptError, match="cached"):
        replace(gateway, outcome="failed", generated=0, computed=701)


@given(requests(), st.data())
def test_any_change_breaks_the_signature(made: dict[Side, Receipt], data: st.DataObject) -> None:
    receipt = made[data.draw(st.sampled_from(("gateway", "prefill", "decode")))]
    plain = msgspec.to_builtins(signed(receipt))
    field = data.draw(st.sampled_from(sorted(plain["receipt"])))
    plain["receipt"][field] = data.draw(_other(plain["receipt"][field]))
    try:
        changed = decode(msgspec.json.encode(plain))
    except ReceiptError:
        return  # it contradicts itself, or is none
    with pytest.raises(ReceiptError, match=r"not signed by|no key of a"):
        trust().check(changed)


def _other(value: Any) -> st.SearchStrategy[Any]:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, int):
        return st.integers(0, MAX_COUNT).filter(lambda n: n != value)
    if isinstance(value, dict):
        return st.just({**value, "REMAP": value.get("REMAP", 0) + 1})
    names = st.sampled_from(("gateway", "prefill", "decode", "cancelled", "failed", "gw-0", "p-0", "d-0", "x", ""))
    return names.filter(lambda text: text != value)


def test_a_key_vouches_for_its_own_name_and_kind_alone() -> None:
    made = request()
    with pytest.raises(ReceiptError, match="request r-1, prefill: not signed by 'p-0', or changed since"):
        trust().check(sign(made["prefill"], KEYS["d-0"]))
    as_gateway = replace(made["gateway"], by="p-0")  # a worker's name, and its own key
    with pytest.raises(ReceiptError, match="request r-1, gateway: no key of a gateway 'p-0' is trusted"):
        trust().check(sign(as_gateway, KEYS["p-0"]))


def test_what_is_signed_otherwise_is_no_receipt_and_the_other_way_round() -> None:
    receipt = request()["gateway"]
    alien = keys.sign(KEYS["gw-0"], b"regauge quality record 1\n", canonical(receipt))
    with pytest.raises(ReceiptError, match="not signed"):
        trust().check(Signed(receipt, alien))
    assert CONTEXT.endswith(b"\n")
    with pytest.raises(ReceiptError, match="not signed"):
        trust().check(Signed(receipt, "no hex"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not a receipt"),
        (b"\xff", "not a receipt"),
        (b"[" * 60_000, "not a receipt"),
        (b'{"receipt": {}, "signature": ""}', "missing required field `request`"),
        (b"x" * 70_000, "larger than 65536 bytes"),
    ],
)
def test_what_is_no_receipt_is_told_by_file_and_line(line: bytes, said: str) -> None:
    good = encode(signed(request()["gateway"]))
    found = list(receipts.read_lines([good, b"\n", line, good], "got.jsonl"))
    assert [type(f) for f in found] == [Signed, ReceiptError, Signed]
    assert str(found[1]).startswith("got.jsonl:3: ")
    assert said in str(found[1])


@given(st.binary(max_size=200), st.integers(0, 2_000), st.integers(0, 3))
def test_bytes_of_a_stranger_are_a_receipt_or_refused(noise: bytes, at: int, cut: int) -> None:
    good = encode(signed(request()["gateway"]))
    place = at % len(good)
    for data in (noise, good[:place] + noise + good[place + cut :]):
        for line in data.split(b"\n"):
            for found in receipts.read_lines([line], "x"):
                text = str(found) if isinstance(found, ReceiptError) else encode(found).decode()
                assert text.startswith(("x:1: ", '{"receipt"'))


def test_unknown_fields_are_refused() -> None:
    plain = msgspec.to_builtins(signed(request()["gateway"]))
    plain["receipt"]["discount"] = 1
    with pytest.raises(ReceiptError, match="discount"):
        decode(msgspec.json.encode(plain))


def test_trust_is_a_folder_of_public_keys_with_older_ones_beside(tmp_path: Path) -> None:
    for place in ("gateways/gw-0", "workers/p-0", "workers/p-0@2025", "workers/d-0"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        keys.generate(tmp_path / place)
    found = receipts.load_trust(tmp_path)
    for name in ("p-0", "p-0@2025"):
        found.check(sign(request()["prefill"], keys.load_private(tmp_path / "workers" / name)))
    with pytest.raises(ReceiptError, match="not signed"):
        found.check(sign(request()["prefill"], keys.load_private(tmp_path / "workers/d-0")))
    with pytest.raises(ReceiptError, match="no key of a gateway"):
        Trust({}, {}).check(signed(request()["gateway"]))
    with pytest.raises(ConfigError, match="holds no public keys"):
        receipts.load_trust(tmp_path / "workers")
    (tmp_path / "workers/bad.pub").write_text("no key")
    with pytest.raises(ConfigError, match=r"bad\.pub: no public key in PEM"):
        receipts.load_trust(tmp_path)
