"""Requests as all their sides saw them, to be told right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st
from msgspec.structs import replace

from regauge.meter.receipt import PathName, Receipt, Side, Trust, Verified, sign
from regauge.meter.reconcile import Arrival

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
NOON_US = 1_793_448_000_000_000
"""2026-10-31T12:00:00Z."""
KEYS = {name: Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b".")) for name in ("gw-0", "p-0", "d-0")}


def trust() -> Trust:
    public = {name: [key.public_key()] for name, key in KEYS.items()}
    return Trust({"gw-0": public["gw-0"]}, {"p-0": public["p-0"], "d-0": public["d-0"]})


def signed(receipt: Receipt) -> Verified:
    return sign(receipt, KEYS[receipt.by])


def request(
    name: str = "r-1", *, at_us: int = NOON_US, cached: int = 300, computed: int = 700, generated: int = 50, **more: Any
) -> dict[Side, Receipt]:
    """What the three sides say of a request that went well; `more`: fields of all of them."""
    prompt = cached + computed
    path: PathName = "CONVERT"
    fields: dict[str, Any] = {
        "request": name, "tenant": "acme", "model": "qwen3-32b", "route": "network-aware", "prefill": "p-0", "decode": "d-0",
        "outcome": "complete", "prompt": prompt, "cached": cached, "computed": computed, "transferred": prompt,
        "converted": prompt, "wire_bytes": {path: 1_024 * prompt} if prompt else {}, "digest": "ab" * 16, **more,
    }  # fmt: skip
    gateway = Receipt(
        side="gateway", by="gw-0", began_us=at_us, ended_us=at_us + 2_000_000, generated=generated, **fields
    )
    prefill = Receipt(side="prefill", by="p-0", began_us=at_us + 1_000, ended_us=at_us + 900_000, **fields)
    decode = Receipt(
        side="decode", by="d-0", began_us=at_us + 1_500, ended_us=at_us + 1_999_000, generated=generated, **fields
    )
    return {"gateway": gateway, "prefill": prefill, "decode": decode}


def arrivals(receipts: Sequence[Receipt] | dict[Side, Receipt], after_us: int = 10_000) -> list[Arrival]:
    """These receipts, each having come so long after its side's end."""
    values = receipts.values() if isinstance(receipts, dict) else receipts
    return [Arrival(r, r.ended_us + after_us) for r in values]


@st.composite
def requests(draw: st.DrawFn, name: str = "r-1") -> dict[Side, Receipt]:
    """Any request that went well, through all three sides."""
    counts = {key: draw(st.integers(0, 1 << 22)) for key in ("cached", "computed", "generated")}
    made = request(name, at_us=NOON_US + draw(st.integers(0, DAY_US)), tenant=draw(st.sampled_from(("acme", "zeta"))),
                   model=draw(st.sampled_from(("qwen3-32b", "org/other"))), **counts)  # fmt: skip
    prompt = counts["cached"] + counts["computed"]
    transferred = draw(st.integers(0, prompt))
    crossed: dict[PathName, int] = draw(
        st.dictionaries(st.sampled_from(("DIRECT", "REMAP", "CONVERT")), st.integers(1, 1 << 40), max_size=3)
    )
    more = {"transferred": transferred, "converted": draw(st.integers(0, transferred)), "wire_bytes": crossed}
    return {side: replace(receipt, **more) for side, receipt in made.items()}
