"""What an operator types to see what was used, to bill it, and to prove it: output, exit codes, what bad input says."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from datetime import UTC, date, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from msgspec.structs import replace

from meter_cases import DAY_US, HOUR_US, KEYS, NOON_US, request, signed
from regauge import keys
from regauge.cli import main
from regauge.meter import prices, render
from regauge.meter.invoice import Used, bill
from regauge.meter.receipt import CONTEXT, canonical, encode
from regauge.meter.store import Store

BOOK = """currency = "EUR"
[issuer]
name = "Rails & Gauges <GmbH>"
address = ["1 Junction Road"]
note = "Payable within 30 days."
[customers.acme]
name = "Acme"
[[price]]
name = "standard"
cached_input = 0.10
uncached_input = 0.50
output = 2.00
[[price.tier]]
above = 1_000
cached_input = 0.05
uncached_input = 0.25
output = 1.00
[[price]]
name = "=night"
tenant = "acme"
hours = "22:00-06:00"
cached_input = 0.01
uncached_input = 0.05
output = 0.20
"""
EVIL = "<script>alert('x')</script>"


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "prices.toml"
    path.write_text(BOOK)
    return str(path)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """October: two days of acme by day and one by night, one request of another, one that differs and one without decode."""
    url = str(tmp_path / "receipts.db")
    made = Store(url)
    batches = [
        request("r-1", at_us=NOON_US - DAY_US, computed=1_000_000, generated=1_000),
        request("r-2", generated=50_000),
        request("r-3", at_us=NOON_US + 11 * HOUR_US, generated=10_000),
        request("r-4", tenant="zeta", model=EVIL),
        request("r-5"),
        request("r-6"),
    ]
    batches[4]["decode"] = replace(batches[4]["decode"], generated=51)
    del batches[5]["decode"]
    made.add([(signed(r), r.ended_us) for batch in batches for r in batch.values()])
    made.close()
    return url


@pytest.fixture
def trust(tmp_path: Path) -> str:
    for kind, name in (("gateways", "gw-0"), ("workers", "p-0"), ("workers", "d-0")):
        (tmp_path / "trust" / kind).mkdir(parents=True, exist_ok=True)
        (tmp_path / "trust" / kind / f"{name}.pub").write_bytes(keys.public_pem(KEYS[name].public_key()))
    return str(tmp_path / "trust")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out = capsys.readouterr()
    return code, out.out, out.err


OCTOBER = ("--from", "2026-10-01", "--until", "2026-11-01")


def test_usage_as_a_table_as_csv_and_as_json(capsys: pytest.CaptureFixture[str], store: str) -> None:
    code, out, _ = run(capsys, "usage", "--store", store, *OCTOBER)
    assert code == 0
    assert out.splitlines()[0].split()[:5] == ["from", "tenant", "model", "requests", "prompt"]
    assert out.splitlines()[1].split()[:5] == ["2026-10-30T00:00Z", "acme", "qwen3-32b", "1", "1,000,300"]
    code, out, _ = run(capsys, "usage", "--store", store, *OCTOBER, "--by", "total", "--json")
    acme, zeta = json.loads(out)
    assert (acme["requests"], acme["generated"], zeta["model"]) == (5, 61_100, EVIL)
    assert acme["convert_bytes"] == 1_024 * (1_000_300 + 4 * 1_000)
    code, out, _ = run(capsys, "usage", "--store", store, *OCTOBER, "--by", "month", "--tenant", "acme", "--csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["from"], row["requests"], row["cached"]) == ("2026-10-01T00:00Z", "5", "1500")
    code, out, _ = run(capsys, "usage", "--store", store, *OCTOBER, "--by", "hour", "--json")
    assert [(r["from"], r["requests"]) for r in json.loads(out) if r["tenant"] == "acme"] == [
        ("2026-10-30T12:00Z", 1), ("2026-10-31T12:00Z", 3), ("2026-10-31T23:00Z", 1)
    ]  # fmt: skip
    assert run(capsys, "usage", "--store", store, "--from", "2027-01-01")[1] == "nothing was used in this time\n"


def test_requests_in_trouble_are_told(capsys: pytest.CaptureFixture[str], store: str) -> None:
    code, out, _ = run(capsys, "usage", "--store", store, *OCTOBER, "--troubled")
    assert code == 1
    assert out.splitlines() == [
        "r-5 (acme, qwen3-32b): generated: gateway says 50, decode says 51",
        "r-6 (acme, qwen3-32b): decode's receipt is missing",
    ]
    code, out, _ = run(capsys, "usage", "--store", store, *OCTOBER, "--troubled", "--json")
    assert [(e["request"], e["status"]) for e in json.loads(out)] == [("r-5", "differs"), ("r-6", "missing")]
    assert run(capsys, "usage", "--store", store, *OCTOBER, "--troubled", "--tenant", "zeta")[0] == 0


def test_an_invoice_to_the_cent(capsys: pytest.CaptureFixture[str], store: str, book: str) -> None:
    code, out, _ = run(capsys, "invoice", "--store", store, "--prices", book, "--tenant", "acme", "--month", "2026-10")
    assert code == 0
    assert [line.split() for line in out.splitlines()[3:9]] == [
        ["qwen3-32b", "=night", "cached", "input", "0", "300", "0.01", "0.00"],
        ["qwen3-32b", "=night", "input", "0", "700", "0.05", "0.00"],
        ["qwen3-32b", "=night", "output", "0", "10,000", "0.20", "0.00"],
        ["qwen3-32b", "standard", "cached", "input", "0", "600", "0.10", "0.00"],
        ["qwen3-32b", "standard", "input", "0", "1,000", "0.50", "0.00"],
        ["qwen3-32b", "standard", "input", "1,000", "999,700", "0.25", "0.25"],
    ]
    code, out, _ = run(
        capsys, "invoice", "--store", store, "--prices", book, "--tenant", "acme", "--month", "2026-10", "--json"
    )
    made = json.loads(out)
    assert (made["number"], made["requests"], made["total_text"]) == ("acme-20261001", 3, "0.30")
    assert made["open"] == {"missing": 1, "differs": 1, "void": 0}
    assert made["total"] == sum(line["amount"] for line in made["lines"])
    code, out, _ = run(
        capsys, "invoice", "--store", store, "--prices", book, "--tenant", "acme", "--month", "2026-10", "--csv"
    )
    assert [row["price"] for row in csv.DictReader(io.StringIO(out))][:1] == ["'=night"]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "style")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_printed_invoice_holds_everything_and_nothing_that_runs(
    capsys: pytest.CaptureFixture[str], store: str, book: str, tmp_path: Path
) -> None:
    page = tmp_path / "invoice.html"
    arguments = ("--store", store, "--prices", book, "--month", "2026-10", "--html", str(page))
    assert run(capsys, "invoice", "--tenant", "zeta", "--number", "<b>7", *arguments)[0] == 0
    found = _Page()
    found.feed(page.read_text())
    assert not found.tags & {"script", "b", "img", "link", "iframe"}
    assert found.links == []
    for text in (
        EVIL,
        "Invoice <b>7",
        "Rails & Gauges <GmbH>",
        "2026-10-01 to 2026-10-31",
        "Payable within 30 days.",
        "Total",
    ):
        assert text in found.text
    assert run(capsys, "invoice", "--tenant", "acme", *arguments)[0] == 0
    assert "not billed: 1 request whose receipts differ" in page.read_text()


def test_what_has_no_price_makes_exit_code_1(capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path) -> None:
    path = tmp_path / "narrow.toml"
    path.write_text(BOOK.replace('name = "standard"', 'name = "standard"\nmodel = "other"'))
    arguments = ("--store", store, "--prices", str(path), "--tenant", "acme", "--month", "2026-10")
    code, out, _ = run(capsys, "invoice", *arguments)
    assert code == 1
    assert "NOT BILLED: 1,052,300 tokens of qwen3-32b from 2026-10-30T12:00Z on: no price fits them" in out


def test_a_price_book_is_shown_and_asked(capsys: pytest.CaptureFixture[str], book: str) -> None:
    code, out, _ = run(capsys, "prices", book)
    assert code == 0
    assert out.splitlines()[2].split() == ["standard", "*", "*", "00:00-24:00", "1,000", "0.05", "0.25", "1.00"]
    assert out.endswith("EUR per million tokens; times are of UTC\n")
    code, out, _ = run(capsys, "prices", book, "--tenant", "acme", "--model", "m", "--at", "2026-10-31T23:00+01:00")
    assert (code, out.split()[0]) == (0, "'=night'")
    assert run(capsys, "prices", book, "--tenant", "acme", "--at", "2026-10-31T21:59")[1].split()[0] == "'standard'"
    assert json.loads(run(capsys, "prices", book, "--json")[1])["price"][0]["uncached_input"] == "0.50"
    rows = list(csv.reader(io.StringIO(run(capsys, "prices", book, "--csv")[1])))
    assert rows[3][:2] == ["'=night", "acme"]


def test_exported_receipts_are_verified_and_imported(
    capsys: pytest.CaptureFixture[str], store: str, trust: str, tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "meter", "export", "--store", store)
    assert (code, len(out.splitlines())) == (0, 17)
    file = tmp_path / "receipts.jsonl"
    file.write_text(
        "".join(line for line in out.splitlines(keepends=True) if '"r-5"' not in line and '"r-6"' not in line)
    )
    code, out, _ = run(capsys, "meter", "verify", str(file), "--trust", trust)
    assert (code, out) == (0, "all is well\n12 receipts verified, 0 bad; requests: 4 agreed\n")
    copy = str(tmp_path / "copy.db")
    assert run(capsys, "meter", "import", str(file), "--store", copy, "--trust", trust)[1] == (
        "12 receipts added, 0 were there, 0 bad\n"
    )
    again = run(capsys, "meter", "import", str(file), "--store", copy, "--trust", trust, "--json")[1]
    assert json.loads(again) == {"new": 0, "known": 12, "bad": []}
    assert run(capsys, "meter", "export", "--store", copy)[1] == file.read_text()


def test_what_was_tampered_with_is_told(
    capsys: pytest.CaptureFixture[str], store: str, trust: str, tmp_path: Path
) -> None:
    made = request()
    lines = [encode(signed(r)).decode() for r in made.values()]
    lines[0] = lines[0].replace('"generated":50', '"generated":40')
    liar = replace(made["prefill"], transferred=999, converted=999)  # its own word, well signed
    lines[1] = encode(signed(liar)).decode()
    file = tmp_path / "receipts.jsonl"
    file.write_text("\n".join([*lines, "{}"]) + "\n")
    code, out, _ = run(capsys, "meter", "verify", str(file), "--trust", trust)
    assert code == 1
    assert out.splitlines() == [
        "request r-1, gateway: not signed by 'gw-0', or changed since",
        f"{file}:4: not a receipt: Object missing required field `receipt`",
        "r-1 (acme, qwen3-32b): transferred: prefill says 999, decode says 1000",
        "r-1 (acme, qwen3-32b): converted: prefill says 999, decode says 1000",
        "r-1 (acme, qwen3-32b): gateway's receipt is missing",
        "2 receipts verified, 2 bad; requests: 1 differs",
    ]
    code, out, _ = run(capsys, "meter", "verify", str(file), "--trust", trust, "--json")
    assert (code, json.loads(out)["requests"]) == (1, {"differs": 1})
    code, out, _ = run(capsys, "meter", "import", str(file), "--store", store, "--trust", trust)
    assert (code, out.splitlines()[-1]) == (
        1,
        "2 receipts added, 0 were there, 2 bad",
    )  # beside those of another request of that name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("usage", "--store", "nowhere.db"), "nowhere.db: no such file"),
        (("usage", "--store", "{store}", "--from", "soon"), "--from soon: give a day as in 2026-10-31"),
        (("invoice", "--store", "{store}", "--prices", "{book}", "--tenant", "nobody"), "--tenant nobody: had no requests until"),
        (("invoice", "--store", "{store}", "--prices", "no.toml", "--tenant", "acme"), "no.toml: No such file"),
        (("invoice", "--store", "{store}", "--prices", "{book}", "--tenant", "acme", "--month", "13"), "--month 13-01: give"),
        (
            ("invoice", "--store", "{store}", "--prices", "{book}", "--tenant", "acme", "--from", "2026-10-01"),
            "--from and --until belong together",
        ),
        (
            ("invoice", "--store", "{store}", "--prices", "{book}", "--tenant", "acme", "--month", "2026-10", *OCTOBER),
            "--month: give it, or --from and --until",
        ),
        (
            ("invoice", "--store", "{store}", "--prices", "{book}", "--tenant", "acme", "--html", "/no/where.html"),
            "/no/where.html: No such file",
        ),
        (("prices", "{store}"), "receipts.db: "),
        (("prices", "{book}", "--at", "2026-10-31T12:00"), "--at needs --tenant and --model"),
        (("prices", "{book}", "--tenant", "x", "--at", "noon"), "--at noon: give a time"),
        (("meter", "verify", "no.jsonl", "--trust", "{trust}"), "no.jsonl: No such file"),
        (("meter", "verify", "{store}", "--trust", "nowhere"), "nowhere: holds no public keys"),
    ],
)  # fmt: skip
def test_what_bad_input_says(
    capsys: pytest.CaptureFixture[str], store: str, book: str, trust: str, arguments: tuple[str, ...], said: str
) -> None:
    given = [a.format(store=store, book=book, trust=trust) for a in arguments]
    code, out, err = run(capsys, *given)
    assert code in (1, 2)
    assert said in out + err
    assert "Traceback" not in err


def test_a_table_is_aligned_and_a_formula_is_text() -> None:
    assert render.table(("name", "n"), [("a", 1_000), ("long", 2)]) == "name      n\na     1,000\nlong      2"
    assert render.as_csv(("n",), [("=1+1",), ('a"b',), (-5,)]) == 'n\r\n\'=1+1\r\n"a""b"\r\n-5\r\n'


def test_an_invoice_in_a_currency_without_places(tmp_path: Path) -> None:
    yen = prices.load(BOOK.replace('"EUR"', '"JPY"\nplaces = 0').encode())
    made = bill("N", "acme", (date(2026, 10, 1), date(2026, 11, 1)), yen, [Used(NOON_US, "m", 1, 0, 10**7, 0)])
    assert "total 2 JPY" in render.invoice_text(made)
    assert "2&nbsp;JPY" in render.invoice_html(made, yen, datetime.now(UTC))


def test_openssl_could_verify_a_receipt_too(tmp_path: Path) -> None:
    """The signature is plain Ed25519 over CONTEXT and canonical JSON: nobody needs regauge to check one."""
    made = signed(request()["gateway"])
    (tmp_path / "data").write_bytes(CONTEXT + canonical(made.receipt))
    (tmp_path / "sig").write_bytes(bytes.fromhex(made.signature))
    (tmp_path / "key").write_bytes(
        KEYS["gw-0"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "key", "-rawin", "-in", "data", "-sigfile", "sig"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Signature Verified Successfully" in done.stdout
