"""`regauge probe`: check a declared layout against real bytes, or search a dump of pages for known packings."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from regauge.layout.probe.known import Known
    from regauge.layout.probe.pattern import Pattern
    from regauge.layout.probe.search import Report
    from regauge.layout.probe.verify import Verdict
    from regauge.layout.spec import Layout

MAX_SHOWN = 3


def arguments(probe: argparse.ArgumentParser, layout_help: str, model_help: str) -> None:
    """Add the verb's options."""
    job = probe.add_argument_group("what to do, one of")
    job.add_argument("--engine", choices=("local",), help="write through this engine's pool and check the bytes")
    job.add_argument("--write-pattern", metavar="FILE", help="write numbers for another engine's cache (.npz)")
    job.add_argument(
        "--dump", metavar="[NAME=]FILE", action="append", default=[],
        help="search pages in which such numbers were written: raw bytes or .npy; may be given several times, one for each "
        "region")  # fmt: skip
    probe.add_argument("--layout", metavar="LAYOUT", help=layout_help)
    probe.add_argument("--declared", metavar="LAYOUT", help="with --engine: what to check; default: --layout")
    probe.add_argument(
        "--pattern", metavar="FILE", help="with --dump: the numbers; default: made anew from the options"
    )
    probe.add_argument("--model", default="smollm2-135m-instruct", help=model_help + "; default %(default)s")
    probe.add_argument(
        "--dtype", metavar="NAME", default="bf16",
        help="instead of --layout: dtype of the cache, also with its scale as in fp8,scale=token_head; default %(default)s")  # fmt: skip
    probe.add_argument(
        "--page-size", type=int, default=16, help="instead of --layout: tokens per page, default %(default)s"
    )
    probe.add_argument("--pages", type=int, default=8, help="pages in the pool, default %(default)s")
    probe.add_argument("--page-table", metavar="N,N,...", help="pages that may be written, in this order; default: all")
    probe.add_argument("--layers", metavar="LAYERS", help="layers to write, as in 0-3,7; default: as many as are quick")
    probe.add_argument("--tokens", type=int, help="tokens to write; default: two pages and a part of a third")
    probe.add_argument(
        "--values-dtype", choices=("float32", "bfloat16", "float16"),
        help="what the engine's write operation takes; default: bfloat16 for a pattern, float32 for local")  # fmt: skip
    probe.add_argument("--search-dtype", metavar="NAME", action="append", help="with --dump: only these; default: all")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """Do what was asked. Returns the result as plain data and as text, and the exit code."""
    jobs = [bool(options.engine), bool(options.write_pattern), bool(options.dump)]
    if sum(jobs) != 1:
        raise ConfigError("give one of --engine, --write-pattern and --dump")
    if options.engine:
        return _verify(options)
    return _search(options) if options.dump else _write(options)


def _layout(options: argparse.Namespace, text: str | None) -> Layout:
    from regauge.layout.presets import load_named, with_pages

    layout = load_named(text or f"{options.dtype},page={options.page_size}", options.model)
    if not 1 <= options.pages <= 1 << 20:
        raise ConfigError(f"--pages {options.pages}: give a number from 1 to {1 << 20}")
    return with_pages(layout, options.pages * max(g.page_size for g in layout.groups))


def _layers(options: argparse.Namespace) -> tuple[int, ...] | None:
    from regauge.layout.spec import parse_layers

    return parse_layers(options.layers) if options.layers else None


def _verify(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    from regauge.engines.local.probe import LocalCache
    from regauge.engines.probe import probe

    layout = _layout(options, options.layout)
    declared = _layout(options, options.declared) if options.declared else layout
    with LocalCache(layout, options.values_dtype or "float32") as cache:
        verdict = probe(cache, declared, layers=_layers(options))
    return asdict(verdict), _verdict_text(verdict), 0 if verdict.verified else 1


def _verdict_text(verdict: Verdict) -> str:
    from regauge.layout.spec import format_layers

    word = "verified" if verdict.verified else "NOT as declared"
    lines = [f"{word}: {verdict.elements:,} elements compared in {verdict.rounds} rounds"]
    if verdict.first is not None:
        lines.append(f"  {verdict.first}")
    lines += [f"  {stray}" for stray in verdict.strays]
    lines += [
        f"  covered: {c.kind} of layers {format_layers(c.layers)}, {c.tokens} tokens in pages {', '.join(map(str, c.pages))}"
        for c in (verdict.covered if verdict.verified else ())
    ]
    return "\n".join(lines)


def _pattern(options: argparse.Namespace) -> tuple[Layout, Pattern]:
    from regauge.layout.probe import pattern

    layout = _layout(options, options.layout)
    usable = None
    if options.page_table:
        try:
            pages = [int(x) for x in options.page_table.split(",")]
        except ValueError:
            raise ConfigError(f"--page-table {options.page_table}: give page numbers, as in 3,1,2") from None
        # A pattern begins with the last of the usable pages.
        usable = {index: [*pages[1:], pages[0]] for index in range(len(layout.groups))}
    made = pattern.make(
        layout, source=options.values_dtype or "bfloat16", usable=usable, layers=_layers(options), tokens=options.tokens,
        rounds=1)  # fmt: skip
    return layout, made


def _write(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    from regauge.layout.probe.known import Known

    known = Known.of(*_pattern(options))
    known.save(Path(options.write_pattern))
    arrays = {
        f"{index}.{name}": list(v.shape) for index, values in enumerate(known.values) for name, v in values.items()
    }
    tables = {f"{index}.pages": table.tolist() for index, table in enumerate(known.tables)}
    text = [f"{options.write_pattern}: numbers for {known.layout.model.name}"]
    text += [f"  {name}  float32 {shape}: layers, tokens, heads, dim" for name, shape in arrays.items()]
    text += [f"  {name}  {table}: token t goes to page pages[t // page size]" for name, table in tables.items()]
    return {"file": options.write_pattern, "arrays": arrays, "pages": tables}, "\n".join(text), 0


def _search(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    from regauge.layout.dtypes import DTYPES, canonical
    from regauge.layout.probe.candidates import candidates
    from regauge.layout.probe.known import Known, load, read_dump
    from regauge.layout.probe.search import Search, regions_of

    dtypes = [canonical(x) or x for x in options.search_dtype or [n for n, d in DTYPES.items() if not d.opaque]]
    if unknown := [x for x in dtypes if x not in DTYPES or DTYPES[x].opaque]:
        raise ConfigError(
            f"--search-dtype {unknown[0]}: choose {', '.join(n for n, d in DTYPES.items() if not d.opaque)}"
        )
    known: Known = load(Path(options.pattern)) if options.pattern else Known.of(*_pattern(options))
    named = [text.partition("=") if "=" in text else (Path(text).stem, "=", text) for text in options.dump]
    regions = regions_of([(name, read_dump(Path(file))) for name, _, file in named])
    sizes = sum(data.size for data in regions.values())
    report = Search(known, regions).run(candidates(known.layout, dtypes, nbytes=sizes), dtypes)
    return _report(report), _report_text(report), 0 if report.hits else 1


def _report(report: Report) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(report)
    return plain


def _report_text(report: Report) -> str:
    from regauge.layout import files

    lines: list[str] = []
    for hit in report.hits[:MAX_SHOWN]:
        lines.append(f"# explained by {' = '.join(hit.names)}")
        if not hit.exact:
            lines.append("# pages are so; distances between pages, layers and components are as measured")
        lines += [f"# {note}" for note in hit.notes]
        lines.append(files.encode(hit.layout, format="toml").decode())
    if not report.hits:
        lines.append("no known packing explains the dump")
        lines += [f"  {p.name}: explains {', '.join(p.found)}; not {', '.join(p.missing)}" for p in report.partial]
    lines += [f"# measured: {text}" if report.hits else f"  measured: {text}" for text in report.measured]
    if len(report.hits) > MAX_SHOWN:
        lines.append(f"# {len(report.hits) - MAX_SHOWN} more explanations: use --json")
    return "\n".join(lines)
