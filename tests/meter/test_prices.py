"""Price books: read exactly, refused with the field or both prices named, and one price for every request and time."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.meter import prices
from regauge.meter.prices import KINDS, QUARTERS, UNIT, Book, load, quarters

HEAD = 'currency = "EUR"\n'


def price(name: str = "standard", more: str = "", rates: tuple[str, str, str] = ("0.10", "0.50", "2.00")) -> str:
    return (
        f'[[price]]\nname = "{name}"\n{more}\n'
        f"cached_input = {rates[0]}\nuncached_input = {rates[1]}\noutput = {rates[2]}\n"
    )


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@given(st.decimals(0, 10**9, places=9, allow_nan=False), st.sampled_from(KINDS))
def test_prices_are_exact(value: Decimal, kind: str) -> None:
    """Also those that no float can hold, with or without quotes."""
    for shown in (f"{value:f}", f'"{value:f}"'):
        rates = [shown if k == kind else "0" for k in KINDS]
        (found,) = load((HEAD + price(rates=(rates[0], rates[1], rates[2]))).encode()).price
        assert getattr(found, kind) == value
        assert Decimal(found.units(kind)) / UNIT * 10**6 == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "currency"),
        (HEAD, "price"),
        ('currency = "euro"\n' + price(), "currency"),
        (HEAD + 'discount = "10%"\n' + price(), "discount"),
        (HEAD + price(more="colour = 1"), "colour"),
        (HEAD + price() + "[[price.tier]]\nabove = 5\n", r"tier\[0\]|cached_input"),
        (HEAD + price(rates=("0.1", "-0.5", "2")), "price 'standard'.uncached_input: must be from 0 to 1000000000, not -0.5"),
        (HEAD + price(rates=("0.1", "nan", "2")), "price 'standard'.uncached_input: must be from 0"),
        (HEAD + price(rates=("0.1", "inf", "2")), "price 'standard'.uncached_input: must be from 0"),
        (HEAD + price(rates=("0.1", "1e99999", "2")), "price 'standard'.uncached_input: must be from 0"),
        (HEAD + price(rates=("0.1", "true", "2")), "uncached_input"),
        (HEAD + price(rates=("0.0000000001", "1", "2")), "cached_input: 1E-10 has more than 9 places"),
        (HEAD + price(more="from = 2026-02-01\nuntil = 2026-02-01"), "price 'standard'.until: must be after from"),
        (HEAD + price(more='from = "soon"'), "from"),
        (HEAD + price(more='hours = "9-17"'), "price 'standard'.hours: '9-17' is no time of day"),
        (HEAD + price(more='hours = "09:10-17:00"'), "on the quarter"),
        (HEAD + price(more='hours = "24:00-06:00"'), "is no time of day"),
        (HEAD + price(more='hours = "06:00-06:00"'), "is no time of day"),
        (HEAD + 'timezone = "Mars/Olympus"\n' + price(), "timezone: 'Mars/Olympus' is not known here"),
        (HEAD + 'timezone = "../../etc/passwd"\n' + price(), "timezone: "),
        (HEAD + price() + price(more='tenant = "acme"'), "price 'standard': is there twice"),
        (
            HEAD + price() + "[[price.tier]]\nabove = 5\ncached_input = 1\nuncached_input = 1\noutput = 1\n"
            "[[price.tier]]\nabove = 5\ncached_input = 1\nuncached_input = 1\noutput = 1\n",
            r"price 'standard'.tier\[1\].above: must grow",
        ),
        ("x = [", "TOML|Invalid|line"),
    ],
)  # fmt: skip
def test_what_a_book_must_not_say_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(text.encode())


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("", "", True),
        ('hours = "00:00-12:00"', 'hours = "12:00-24:00"', False),
        ('hours = "22:00-06:00"', 'hours = "05:45-10:00"', True),
        ('hours = "22:00-06:00"', 'hours = "06:00-22:00"', False),
        ("until = 2026-02-01", "from = 2026-02-01", False),
        ("until = 2026-02-02", "from = 2026-02-01", True),
        ('tenant = "acme"', "", False),
        ('model = "m"', 'model = "m"', True),
        ('model = "m"', 'model = "n"', False),
    ],
)
def test_two_prices_of_the_same_moment_are_refused_with_both_named(one: str, other: str, clash: bool) -> None:
    text = (HEAD + price("first", one) + price("second", other)).encode()
    if not clash:
        assert len(load(text).price) == 2
        return
    with pytest.raises(ConfigError, match=r"price 'first' \(.*\) and price 'second' \(.*\) hold at the same time"):
        load(text)


BOOK = load(
    (
        HEAD
        + 'timezone = "Europe/Berlin"\n'
        + price("all")
        + price("model", 'model = "m"')
        + price("tenant", 'tenant = "acme"\nfrom = 2026-01-01\nuntil = 2027-01-01')
        + price("both", 'tenant = "acme"\nmodel = "m"\nhours = "22:00-06:00"')
    ).encode()
)


@pytest.mark.parametrize(
    ("tenant", "model", "when", "found"),
    [
        ("zeta", "x", "2026-07-01T12:00:00+00:00", "all"),
        ("zeta", "m", "2026-07-01T12:00:00+00:00", "model"),
        ("acme", "x", "2026-07-01T12:00:00+00:00", "tenant"),
        ("acme", "m", "2026-07-01T12:00:00+00:00", "tenant"),
        ("acme", "m", "2026-07-01T19:59:59+00:00", "tenant"),  # 21:59 in Berlin
        ("acme", "m", "2026-07-01T20:00:00+00:00", "both"),
        ("acme", "m", "2026-12-01T20:00:00+00:00", "tenant"),  # 21:00: winter
        ("acme", "m", "2026-12-02T04:59:59+00:00", "both"),
        ("acme", "m", "2026-12-02T05:00:00+00:00", "tenant"),
        ("acme", "x", "2025-12-31T22:59:59+00:00", "all"),
        ("acme", "x", "2025-12-31T23:00:00+00:00", "tenant"),  # the new year in Berlin
        ("acme", "x", "2026-12-31T23:00:00+00:00", "all"),
    ],
)
def test_the_price_of_a_request(tenant: str, model: str, when: str, found: str) -> None:
    price = BOOK.find(tenant, model, at(when))
    assert price is not None
    assert price.name == found


def test_there_may_be_none() -> None:
    book = load((HEAD + price(more='tenant = "acme"')).encode())
    assert book.find("zeta", "m", datetime(2026, 1, 1, tzinfo=UTC)) is None


@given(st.integers(0, QUARTERS - 1), st.integers(0, QUARTERS))
def test_hours_and_the_rest_of_the_day_are_the_day(begin: int, end: int) -> None:
    def text(quarter: int) -> str:
        return f"{quarter // 4:02}:{quarter % 4 * 15:02}"

    if begin == end or (begin, end) == (0, QUARTERS):
        return
    first = quarters(f"{text(begin)}-{text(end)}")
    second = quarters(f"{text(end % QUARTERS)}-{text(begin or QUARTERS)}") if end % QUARTERS != begin else frozenset()
    assert first | second == set(range(QUARTERS))
    assert not first & second


def test_a_file_is_named_with_what_is_wrong_in_it(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    with pytest.raises(ConfigError, match=r"prices\.toml: No such file"):
        prices.read(path)
    path.write_text("currency = 1")
    with pytest.raises(ConfigError, match=r"prices\.toml: .*currency"):
        prices.read(path)
    path.write_text(HEAD + price() + '[issuer]\nname = "R"\n[customers.acme]\nname = "Acme"\naddress = ["A", "B"]\n')
    book = prices.read(path)
    assert isinstance(book, Book)
    assert (book.customers["acme"].address, book.issuer.name) == (["A", "B"], "R")
    assert book.price[0].holds(date(2026, 1, 1), 95)
