"""Receipts of all sides come to one entry: agreed only if nothing differs, whatever order and however often they come."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meter_cases import DAY_US, arrivals, request, requests
from regauge.errors import ReceiptError
from regauge.meter.receipt import Receipt, Side
from regauge.meter.reconcile import Arrival, Entry, reconcile, reconcile_all, recover

SHARED = ("tenant", "model", "route", "prefill", "decode", "resumes", "digest", "prompt", "cached", "computed",
          "transferred", "converted", "generated", "wire_bytes", "outcome")  # fmt: skip


def entry(receipts: dict[Side, Receipt]) -> Entry:
    return reconcile(arrivals(receipts))


@given(requests())
def test_what_all_say_is_agreed_and_charged(made: dict[Side, Receipt]) -> None:
    found, gateway = entry(made), made["gateway"]
    assert (found.status, found.differences, found.missing, found.late) == ("agreed", (), (), ())
    for name in (
        "prompt",
        "cached",
        "computed",
        "transferred",
        "converted",
        "generated",
        "wire_bytes",
        "tenant",
        "model",
    ):
        assert getattr(found, name) == getattr(gateway, name)
    assert found.charged == (gateway.cached, gateway.computed, gateway.generated)
    assert found.at_us == gateway.began_us


@given(requests(), st.data())
def test_one_field_that_one_side_says_otherwise_is_flagged(made: dict[Side, Receipt], data: st.DataObject) -> None:
    """And what it costs is nothing, until a person has looked."""
    side: Side = data.draw(st.sampled_from(("gateway", "prefill", "decode")))
    field = data.draw(st.sampled_from(SHARED))
    receipt = made[side]
    old = getattr(receipt, field)
    if old is None:
        return  # the side does not know it
    changed = _changed(receipt, field, data.draw(_value(old)))
    if changed is None:
        return
    found = entry(made | {side: changed})
    assert found.status == "differs"
    assert field in [d.field for d in found.differences]
    assert found.charged == (0, 0, 0)
    shown = next(d for d in found.differences if d.field == field)
    assert shown.values[side] == getattr(changed, field)


def _value(old: Any) -> st.SearchStrategy[Any]:
    if isinstance(old, int):
        return st.integers(0, 1 << 24).filter(lambda n: n != old)
    if isinstance(old, dict):
        return st.just({**old, "REMAP": old.get("REMAP", 0) + 1})
    if old == "complete":
        return st.sampled_from(("cancelled", "resumed", "failed"))
    return st.just(old + "x")


def _changed(receipt: Receipt, field: str, value: Any) -> Receipt | None:
    """The receipt with another value; a lie that the receipt's own invariants refuse, told so that they do not."""
    more: dict[str, Any] = {}
    if field in ("cached", "computed") and receipt.cached is not None and receipt.computed is not None:
        other = "computed" if field == "cached" else "cached"
        more[other] = receipt.prompt - value
    elif field == "prompt":
        more = {"cached": 0, "computed": value} if receipt.cached is not None else {}
    try:
        return replace(receipt, **{field: value, **more})
    except ReceiptError:
        return None


@given(requests(), st.data())
def test_order_and_repetition_change_nothing(made: dict[Side, Receipt], data: st.DataObject) -> None:
    sides = [r for r in made.values() if data.draw(st.booleans())] or [made["decode"]]
    other = [replace(r, model="lie") for r in sides if data.draw(st.booleans())]
    once = arrivals([*sides, *other])
    several = data.draw(st.permutations(once + data.draw(st.lists(st.sampled_from(once), max_size=4))))
    assert reconcile(several) == reconcile(once)


@pytest.mark.parametrize("side", ["gateway", "prefill", "decode"])
def test_a_second_receipt_of_a_side_that_says_something_else_is_flagged(side: Side) -> None:
    made = request()
    other = replace(made[side], ended_us=made[side].ended_us + 1)
    found = reconcile(arrivals([*made.values(), other]))
    assert found.status == "differs"
    assert [d.field for d in found.differences] == [f"{side}.ended_us"]
    assert set(found.differences[0].values) == {side, f"{side}#2"}
    assert f"{side}.ended_us: {side} says" in found.differences[0].text()


@pytest.mark.parametrize("side", ["gateway", "prefill", "decode"])
def test_a_side_that_has_not_spoken_is_missing_and_nothing_is_charged(side: Side) -> None:
    made = request()
    del made[side]
    found = entry(made)
    assert (found.status, found.missing, found.charged) == ("missing", (side,), (0, 0, 0))
    assert (found.prompt, found.computed) == (1_000, 700)  # what the others know is known


def test_a_receipt_that_comes_after_the_grace_is_late_and_counts() -> None:
    made = request()
    found = reconcile([*arrivals([made["gateway"], made["decode"]]), *arrivals([made["prefill"]], after_us=70_000_000)])
    assert (found.status, found.late) == ("agreed", ("prefill",))
    again = reconcile([*arrivals(made), *arrivals(made, after_us=DAY_US)])
    assert again.late == ()  # it had come in time, too


def test_where_decode_computed_the_prompt_itself_no_prefill_worker_must_speak() -> None:
    alone = {"prefill": "", "transferred": 0, "converted": 0, "wire_bytes": {}, "digest": ""}
    whole = request()
    made: dict[Side, Receipt] = {side: replace(whole[side], **alone) for side in ("gateway", "decode")}
    found = entry(made)
    assert (found.status, found.charged) == ("agreed", (300, 700, 50))
    assert recover(entry({"decode": made["decode"]}), {"decode": made["decode"]}, "gw") is not None
    meddled = entry(made | {"prefill": whole["prefill"]})
    assert "prefill" in [d.field for d in meddled.differences]


def test_void_requests_cost_nothing_and_ask_nobody() -> None:
    made = request()
    for outcome in ("failed", "cancelled"):
        gateway = replace(made["gateway"], outcome=outcome, generated=0, cached=0, computed=0)
        alone = entry({"gateway": gateway})
        assert (alone.status, alone.missing, alone.charged) == ("void", (), (0, 0, 0))
        prefill = replace(made["prefill"], outcome="failed", cached=0, computed=13, transferred=10, converted=10)
        assert entry({"gateway": gateway, "prefill": prefill}).status == "void"
    wrong = entry({"gateway": gateway, "prefill": replace(prefill, tenant="zeta")})
    assert [d.field for d in wrong.differences] == ["tenant"]


def test_a_request_that_decode_finished_cannot_have_failed() -> None:
    """Or revenue could be hidden, a word at a time."""
    made = request()
    for outcome in ("failed", "resumed"):
        found = entry(made | {"gateway": replace(made["gateway"], outcome=outcome)})
        assert ("outcome", {"gateway": outcome, "decode": "complete"}) in [
            (d.field, d.values) for d in found.differences
        ]


def test_tokens_that_the_client_did_not_wait_for_are_not_charged() -> None:
    made = request()
    made["gateway"] = replace(made["gateway"], outcome="cancelled", generated=20)
    made["decode"] = replace(made["decode"], outcome="cancelled", generated=23)
    found = entry(made)
    assert (found.status, found.charged) == ("agreed", (300, 700, 20))
    more = entry(made | {"decode": replace(made["decode"], generated=19)})  # delivered what was never made
    assert [d.field for d in more.differences] == ["generated"]
    undelivered = entry(made | {"prefill": replace(made["prefill"], outcome="failed")})
    assert [d.field for d in undelivered.differences] == ["outcome"]


def test_a_stop_string_at_the_last_token_is_an_end_for_both() -> None:
    made = request()
    made["gateway"] = replace(made["gateway"], outcome="cancelled")
    assert (entry(made).status, entry(made).charged) == ("agreed", (300, 700, 50))
    none = entry(made | {"gateway": replace(made["gateway"], generated=0)})
    assert (none.status, none.charged) == ("void", (0, 0, 0))


def test_prefill_that_died_once_it_had_delivered_need_not_speak() -> None:
    made = request()
    prefill = made.pop("prefill")
    made["gateway"] = replace(made["gateway"], silent=("prefill",))
    assert (entry(made).status, entry(made).charged, entry(made).silent) == ("agreed", (300, 700, 50), ("prefill",))
    assert entry(made | {"prefill": prefill}).status == "agreed"
    assert entry(made | {"prefill": replace(prefill, digest="00")}).status == "differs"
    with pytest.raises(ReceiptError, match="silent: only a gateway"):
        replace(prefill, silent=("prefill",))
    with pytest.raises(ReceiptError, match="silent: only a gateway"):
        replace(made["gateway"], prefill="")


def test_a_request_that_goes_on_from_another_pays_for_its_output_alone() -> None:
    first = request("r-1")
    del first["decode"]  # it died
    first["gateway"] = replace(first["gateway"], outcome="resumed", generated=20)
    second = request("r-2", cached=900, computed=120, generated=30, resumes="r-1")
    found = {e.request: e for e in reconcile_all(arrivals([*first.values(), *second.values()]))}
    assert [found[name].status for name in ("r-1", "r-2")] == ["agreed", "agreed"]
    assert [found[name].charged for name in ("r-1", "r-2")] == [(300, 700, 20), (0, 0, 30)]


def test_times_that_cannot_be_are_flagged() -> None:
    made = request()
    early = replace(made["prefill"], began_us=made["prefill"].began_us - 3_600_000_000)
    assert [d.field for d in entry(made | {"prefill": early}).differences] == ["began_us"]
    late = replace(made["decode"], ended_us=made["decode"].ended_us + 3_600_000_000)
    assert [d.field for d in entry(made | {"decode": late}).differences] == ["ended_us"]
    skewed = replace(made["decode"], ended_us=made["decode"].ended_us + 50_000_000)
    assert entry(made | {"decode": skewed}).status == "agreed"


def test_receipts_of_several_requests_are_no_request() -> None:
    for receipts in ([], [request("a")["gateway"], request("b")["gateway"]]):
        with pytest.raises(ValueError, match="give receipts of one request"):
            reconcile(arrivals(receipts))


@given(requests())
def test_a_lost_gateway_receipt_is_made_again_from_the_workers(made: dict[Side, Receipt]) -> None:
    lost = made.pop("gateway")
    again = recover(entry(made), made, "gw-1")
    assert again is not None
    whole = entry(made | {"gateway": again})
    assert (whole.status, whole.recovered) == ("agreed", True)
    assert whole.charged == (lost.cached, lost.computed, lost.generated)
    both = reconcile(arrivals([*made.values(), again, lost]))  # it was not lost after all
    assert (both.status, both.recovered) == ("agreed", False)


def test_nothing_is_made_up_where_the_workers_do_not_suffice() -> None:
    made = request()
    del made["gateway"]
    assert recover(entry({"prefill": made["prefill"]}), {"prefill": made["prefill"]}, "gw") is None
    assert recover(entry({"decode": made["decode"]}), {"decode": made["decode"]}, "gw") is None
    short = {side: replace(r, tenant="") for side, r in made.items()}
    assert recover(entry(short), short, "gw") is None
    apart = made | {"decode": replace(made["decode"], transferred=10, converted=10)}
    assert recover(entry(apart), apart, "gw") is None


def test_what_ended_with_its_gateway_is_void_and_its_late_receipt_counts_all_the_same() -> None:
    made = request()
    lost = made.pop("gateway")
    made["decode"] = replace(made["decode"], outcome="cancelled", generated=7)
    again = recover(entry(made), made, "gw-1")
    assert again is not None
    assert (again.outcome, entry(made | {"gateway": again}).status) == ("failed", "void")
    turned_up = replace(lost, outcome="cancelled", generated=5)
    whole = reconcile(arrivals([*made.values(), again, turned_up]))
    assert (whole.status, whole.charged) == ("agreed", (300, 700, 5))


def test_who_died_with_the_gateway_is_waited_for_until_it_is_known_to_have_nothing() -> None:
    made = {"prefill": request()["prefill"]}
    assert recover(entry(made), made, "gw-1", {"p-0"}) is None
    again = recover(entry(made), made, "gw-1", {made["prefill"].decode})
    assert again is not None
    assert entry({**made, "gateway": again}).status == "void"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_who_was_lost_and_comes_to_another_end_later_is_no_difference(side: Side) -> None:
    made = request()
    made["gateway"] = replace(made["gateway"], silent=(side,))
    made[side] = replace(made[side], outcome="cancelled", transferred=0, converted=0, wire_bytes={}, digest="")
    assert (entry(made).status, entry(made).charged) == ("agreed", (300, 700, 50))
    made[side] = replace(request()[side], transferred=999, converted=999)
    assert entry(made).status == "differs", "it came to its end, and says something else"


def test_an_entry_is_read_back_as_it_was_written() -> None:
    made = request()
    made["prefill"] = replace(made["prefill"], wire_bytes={"REMAP": 7})
    found = reconcile([Arrival(r) for r in made.values()])
    assert msgspec.json.decode(msgspec.json.encode(found), type=Entry) == found
