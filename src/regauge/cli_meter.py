"""The command line's verbs about what was used and what it costs: `usage`, `invoice`, `prices`, `meter`. Heavy imports are in the verbs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.errors import ConfigError, ReceiptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.meter.receipt import Signed
    from regauge.meter.reconcile import Entry

    Job = Callable[[str, str], argparse.ArgumentParser]

_STORE_HELP = "the receipts: a file of SQLite, or postgresql://USER@HOST/NAME"
_BATCH = 500


def arguments(verb: Job, jobs: Callable[[argparse.ArgumentParser], Job]) -> None:
    """Add the verbs with what they take; `jobs` gives what adds commands below one."""
    _usage_arguments(verb("usage", "say what tenants used, by model and time"))
    _invoice_arguments(verb("invoice", "bill a tenant: a table, CSV, JSON, or a page to print"))
    _prices_arguments(verb("prices", "check and show a price book, or which price a request has"))
    _meter_arguments(jobs(verb("meter", "verify, export and import receipts")))


def run(options: argparse.Namespace) -> int:
    """Run one of the verbs; return the exit code. Raises ConfigError, StoreError."""
    return {"usage": _usage, "invoice": _invoice, "prices": _prices, "meter": _meter}[options.verb](options)


def _usage_arguments(usage: argparse.ArgumentParser) -> None:
    usage.add_argument("--store", metavar="STORE", required=True, help=_STORE_HELP)
    usage.add_argument("--from", dest="since", metavar="DATE", help="first day (UTC), default: of this month")
    usage.add_argument("--until", metavar="DATE", help="first day that is left out, default: none")
    usage.add_argument("--tenant", metavar="NAME")
    usage.add_argument("--model", metavar="NAME")
    usage.add_argument(
        "--by", choices=("hour", "day", "month", "total"), default="day", help="buckets, default %(default)s"
    )
    usage.add_argument("--csv", action="store_true", help="print CSV")
    usage.add_argument(
        "--troubled", action="store_true", help="instead, the requests whose receipts differ or are missing; exit code 1 if any"
    )  # fmt: skip


def _invoice_arguments(invoice: argparse.ArgumentParser) -> None:
    invoice.add_argument("--store", metavar="STORE", required=True, help=_STORE_HELP)
    invoice.add_argument("--prices", metavar="FILE", required=True, help="price book, see `regauge prices`")
    invoice.add_argument("--tenant", metavar="NAME", required=True)
    invoice.add_argument("--month", metavar="YYYY-MM", help="all of a month; default: the last one that is over")
    invoice.add_argument("--from", dest="since", metavar="DATE", help="instead of a month: first day")
    invoice.add_argument("--until", metavar="DATE", help="first day that is not billed")
    invoice.add_argument("--number", metavar="TEXT", help="default: tenant and first day")
    invoice.add_argument("--csv", action="store_true", help="print the lines as CSV")
    invoice.add_argument("--html", metavar="FILE", help="also write a page to print")


def _prices_arguments(prices: argparse.ArgumentParser) -> None:
    prices.add_argument("book", metavar="FILE", help="price book (TOML)")
    prices.add_argument("--tenant", metavar="NAME", help="with --model: say which price a request has")
    prices.add_argument("--model", metavar="NAME")
    prices.add_argument("--at", metavar="TIME", help="as in 2026-10-31T12:00+01:00; default: now")
    prices.add_argument("--csv", action="store_true", help="print CSV")


def _meter_arguments(job: Job) -> None:
    trust = "folder of public keys: gateways/NAME.pub and workers/NAME.pub"
    verify = job(
        "verify", "check signatures of exported receipts, and reconcile them; exit code 1 for what is not right"
    )
    verify.add_argument(
        "files", metavar="FILE", nargs="+", help="JSON lines, as `meter export` writes them; - is the input"
    )
    verify.add_argument("--trust", metavar="DIR", required=True, help=trust)
    export = job("export", "print receipts as JSON lines")
    export.add_argument("--store", metavar="STORE", required=True, help=_STORE_HELP)
    export.add_argument("--from", dest="since", metavar="DATE", help="first day (UTC) of arrival, default: all")
    export.add_argument("--until", metavar="DATE", help="first day that is left out")
    export.add_argument("--tenant", metavar="NAME")
    add = job("import", "add exported receipts to a store, those that are there already left as they are")
    add.add_argument("files", metavar="FILE", nargs="+", help="JSON lines; - is the input")
    add.add_argument("--store", metavar="STORE", required=True, help=_STORE_HELP)
    add.add_argument("--trust", metavar="DIR", required=True, help=trust)


def _usage(options: argparse.Namespace) -> int:
    """Print usage, or the requests in trouble. Raises ConfigError, StoreError."""
    from regauge.meter import render
    from regauge.meter.store import Store

    today = datetime.now(UTC).date()
    since_us, until_us = _utc(options.since or str(today.replace(day=1)), "--from"), _end(options.until)
    store = Store(options.store, create=False)
    try:
        if options.troubled:
            return _troubled(options, store.troubled(since_us, until_us, tenant=options.tenant))
        found = store.usage(
            since_us, until_us, tenant=options.tenant, model=options.model,
            bucket="hour" if options.by == "hour" else "day",
        )  # fmt: skip
    finally:
        store.close()
    found = {"month": render.months, "total": render.total}.get(options.by, list)(found)
    rows = render.usage_rows(found)
    if options.json:
        print(json.dumps([dict(zip(render.USAGE_HEAD, row, strict=True)) for row in rows], indent=2))
    elif options.csv:
        sys.stdout.write(render.as_csv(render.USAGE_HEAD, rows))
    else:
        print(render.table(render.USAGE_HEAD, rows) if rows else "nothing was used in this time")
    return 0


def _troubled(options: argparse.Namespace, entries: list[Entry]) -> int:
    import msgspec

    if options.json:
        print(json.dumps([msgspec.to_builtins(entry) for entry in entries], indent=2))
    else:
        for entry in entries:
            print("\n".join(_trouble(entry)))
    return 1 if entries else 0


def _trouble(entry: Entry) -> list[str]:
    head = f"{entry.request} ({entry.tenant or 'tenant not known'}, {entry.model}): "
    lines = [head + difference.text() for difference in entry.differences]
    return lines + [f"{head}{side}'s receipt is missing" for side in entry.missing]


def _invoice(options: argparse.Namespace) -> int:
    """Bill a tenant; exit code 1 where tokens have no price. Raises ConfigError, StoreError."""
    import msgspec

    from regauge.meter import invoice as bills
    from regauge.meter import prices, render
    from regauge.meter.store import Store

    book = prices.read(Path(options.prices))
    days = _period(options, datetime.now(book.zone()).date())
    begin_us, end_us = bills.window(*days, book.zone())
    store = Store(options.store, create=False)
    try:
        used = store.charged(options.tenant, begin_us, end_us)
        uncharged = store.uncharged(options.tenant, bills.begin_us(days[0], book.zone()), end_us)
        if not used and options.tenant not in store.tenants(0, end_us):
            raise ConfigError(f"--tenant {options.tenant}: had no requests until {days[1]}")
    finally:
        store.close()
    number = options.number or f"{options.tenant}-{days[0]:%Y%m%d}"
    made = bills.bill(number, options.tenant, days, book, used, uncharged=uncharged)
    if options.html:
        _write(Path(options.html), render.invoice_html(made, book, datetime.now(UTC)))
    if options.json:
        plain = msgspec.to_builtins(made)
        print(json.dumps(plain | {"total_text": bills.money(made.total, made.places)}, indent=2))
    elif options.csv:
        sys.stdout.write(render.as_csv(render.INVOICE_HEAD, render.invoice_rows(made)))
    else:
        print(render.invoice_text(made))
    return 1 if made.unpriced else 0


def _prices(options: argparse.Namespace) -> int:
    """Check a price book and print it, or which of its prices a request has. Raises ConfigError."""
    import msgspec

    from regauge.meter import prices, render

    book = prices.read(Path(options.book))
    if options.tenant is None and options.model is None:
        if options.at is not None:
            raise ConfigError("--at needs --tenant and --model")
        rows = render.price_rows(book)
        if options.json:
            print(json.dumps(msgspec.to_builtins(book), indent=2))
        elif options.csv:
            sys.stdout.write(render.as_csv(render.PRICE_HEAD, rows))
        else:
            print(
                f"{render.table(render.PRICE_HEAD, rows)}\n\n{book.currency} per million tokens; times are of {book.timezone}"
            )
        return 0
    at = _moment(options.at) if options.at else datetime.now(UTC)
    found = book.find(options.tenant or "*", options.model or "*", at)
    if options.json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        print("no price fits" if found is None else found.text())
    return 1 if found is None else 0


def _meter(options: argparse.Namespace) -> int:
    """Run a command of `meter`. Raises ConfigError, StoreError."""
    return {"verify": _verify, "export": _export, "import": _import}[options.what](options)


def _verify(options: argparse.Namespace) -> int:
    from collections import Counter

    import msgspec

    from regauge.meter.receipt import load_trust
    from regauge.meter.reconcile import Arrival, reconcile_all

    trust = load_trust(Path(options.trust))
    bad, good = [], []
    for found in _receipts(options.files):
        try:
            if isinstance(found, ReceiptError):
                raise found
            good.append(Arrival(trust.check(found).receipt))
        except ReceiptError as error:
            bad.append(str(error))
    entries = reconcile_all(good)
    counts = Counter(entry.status for entry in entries)
    troubled = [entry for entry in entries if entry.status in ("differs", "missing")]
    if options.json:
        plain = {"receipts": len(good), "bad": bad, "requests": dict(counts), "troubled": msgspec.to_builtins(troubled)}
        print(json.dumps(plain, indent=2))
    else:
        print("\n".join([*bad, *(line for entry in troubled for line in _trouble(entry))] or ["all is well"]))
        states = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "none"
        print(f"{len(good)} receipts verified, {len(bad)} bad; requests: {states}")
    return 1 if bad or troubled else 0


def _export(options: argparse.Namespace) -> int:
    from regauge.meter.receipt import encode
    from regauge.meter.store import Store

    since_us = _utc(options.since, "--from") if options.since else 0
    store = Store(options.store, create=False)
    try:
        for signed in store.receipts(since_us, _end(options.until), options.tenant):
            sys.stdout.write(encode(signed).decode() + "\n")
    finally:
        store.close()
    return 0


def _import(options: argparse.Namespace) -> int:
    from regauge.meter.receipt import Verified, load_trust
    from regauge.meter.store import Store

    trust = load_trust(Path(options.trust))
    now_us = time.time_ns() // 1_000
    new = same = 0
    bad: list[str] = []
    batch: list[tuple[Verified, int]] = []
    store = Store(options.store)

    def flush() -> None:
        nonlocal new, same
        added = store.add(batch)
        new, same = new + added, same + len(batch) - added
        batch.clear()

    try:
        for found in _receipts(options.files):
            try:
                if isinstance(found, ReceiptError):
                    raise found
                batch.append((trust.check(found), now_us))
            except ReceiptError as error:
                bad.append(str(error))
            if len(batch) >= _BATCH:
                flush()
        flush()
    finally:
        store.close()
    if options.json:
        print(json.dumps({"new": new, "known": same, "bad": bad}, indent=2))
    else:
        print("\n".join([*bad, f"{new} receipts added, {same} were there, {len(bad)} bad"]))
    return 1 if bad else 0


def _receipts(files: list[str]) -> Iterator[Signed | ReceiptError]:
    from regauge.meter.receipt import MAX_LINE_BYTES, read_lines

    for name in files:
        try:
            with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
                yield from read_lines(iter(partial(file.readline, MAX_LINE_BYTES + 2), b""), name)
        except OSError as error:
            raise ConfigError(f"{name}: {error.strerror}") from error


def _period(options: argparse.Namespace, today: date) -> tuple[date, date]:
    if options.month and (options.since or options.until):
        raise ConfigError("--month: give it, or --from and --until")
    if options.since or options.until:
        if not (options.since and options.until):
            raise ConfigError("--from and --until belong together")
        return _day(options.since, "--from"), _day(options.until, "--until")
    if options.month:
        first = _day(f"{options.month}-01", "--month")
    else:
        first = (today.replace(day=1) - timedelta(days=1)).replace(day=1)
    return first, (first + timedelta(days=32)).replace(day=1)


def _day(text: str, option: str) -> date:
    try:
        found = date.fromisoformat(text)
        if not 1970 < found.year < 3000:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{option} {text}: give a day as in 2026-10-31, a month as in 2026-10") from None
    return found


def _moment(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--at {text}: give a time as in 2026-10-31T12:00+01:00") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _utc(text: str, option: str) -> int:
    day = _day(text, option)
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1_000_000


def _end(text: str | None) -> int:
    from regauge.meter.store import END_US

    return _utc(text, "--until") if text else END_US


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
