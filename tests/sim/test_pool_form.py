"""What is typed for a question."""

from __future__ import annotations

import pytest

from regauge.errors import ConfigError
from regauge.sim.ask import Pool
from regauge.sim.model import Interval, Point, exactly
from regauge.sim.pool_form import interval, lengths, parameters, point, pool
from regauge.sim.workload import Lengths


def test_a_pool_as_it_is_typed() -> None:
    assert pool("h200", "--decode", "bf16") == Pool("h200", kv="bf16")
    assert pool(
        "mtt-s5000:12, weights=4.5,compute=0.1:0.12:0.2,span=2,step-overhead=0.001", "--prefill", "bf16"
    ) == Pool("mtt-s5000", 12, 2, kv="bf16", weight_bits=4.5, compute=Interval(0.1, 0.12, 0.2), step_overhead_s=0.001)


def test_numbers_as_they_are_typed() -> None:
    assert lengths("1000:4000", "--input-tokens") == Lengths(1000, 4000)
    assert lengths("1000", "--input-tokens") == Lengths(1000)
    assert point("65536:95920.5:0.9", "--fit") == Point(65536, 95920.5, 0.9)
    assert point("65536:95920.5", "--fit").hit == 0.0
    assert parameters("744:39.3", "--parameters") == (744, 39.3)
    assert parameters("8", "--parameters") == (8, 8)
    assert interval("0.5", "x") == exactly(0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h200:0", "--decode h200:0: give a number of servers, or none"),
        ("h200:-3", "--decode h200:-3: '-3' is no whole number"),
        ("h200,wieghts=4", "--decode: no 'wieghts'; did you mean 'weights'?"),
        ("h200,colour=red", "--decode: no 'colour'; known: span, cards"),
        ("h200,weights=", "--decode weights=: '' is no number"),
        ("h200,weights=nan", "--decode weights=nan: 'nan' is no finite number"),
        ("h200,span=2,span=3", "--decode: span is given twice"),
        ("h200,compute=0.5:0.3:0.4", "--decode compute=0.5:0.3:0.4: give VALUE or LOW:VALUE:HIGH, ascending"),
        ("h200,nic=", "--decode nic=: a name is missing"),
    ],
)
def test_a_pool_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        pool(text, "--decode", "bf16")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (lengths, "many", "'many' is no number"),
        (lengths, "100:50", "over its mean"),
        (point, "65536", "give TOKENS:TOKENS_PER_S"),
        (point, "65536:0", "are positive"),
        (point, "65536:10:1", "from 0 to below 1"),
        (parameters, "10:20", "no more active ones"),
        (parameters, "10:0", "no more active ones"),
    ],
)
def test_numbers_that_cannot_be_read(read: object, text: str, message: str) -> None:
    assert callable(read)
    with pytest.raises(ConfigError, match=message):
        read(text, "--option")
