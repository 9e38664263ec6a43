"""The command line's `bench engine`: an engine's prefill and decode curves, as the catalogue takes them. Heavy imports are in the functions."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from regauge.engines.speeds import Grid, Speeds, Timed

TOLD: Final = 10
"""Times that progress is told."""
NOISY: Final = 0.1
"""Spread of a point above which a note says so."""


def arguments(bench: argparse.ArgumentParser, layout_help: str) -> None:
    """Add what `bench engine` takes."""
    bench.epilog = "With --url the times are those that a client sees, of whatever engine answers there; else the embedded engine's in this process."
    bench.add_argument("--model", help="the bundled model's name, a folder, or a hub name; with --url, the name there")
    bench.add_argument("--url", metavar="URL", help="a server with the OpenAI API, as http://127.0.0.1:8000")
    bench.add_argument("--key-file", metavar="FILE", help="with --url: the API key that it wants")
    bench.add_argument(
        "--ids", metavar="A-B", help="with --url: token ids that prompts are made of, default 1000-10000"
    )
    bench.add_argument(
        "--answer", type=int, metavar="N", help="with --url: most tokens of an answer, default 64 for each of a batch"
    )
    bench.add_argument(
        "--layout", metavar="LAYOUT", help=layout_help + "; of the embedded engine, default bf16,page=16,nhd"
    )
    bench.add_argument("--threads", type=int, metavar="N", help="of the embedded engine, default half of the cores")
    bench.add_argument("--chunk", type=int, metavar="N", help="prompt tokens of its steps, default 256")
    for name, text in (
        ("prompts", "tokens of the prompts, ascending"),
        ("batches", "requests that decode together"),
        ("contexts", "tokens that each of them has"),
    ):
        bench.add_argument(
            f"--{name}", type=_numbers, metavar="N,N,..", help=f"{text}; default {','.join(map(str, _DEFAULTS[name]))}"
        )
    bench.add_argument("--rounds", type=int, metavar="N", help="measurements of each point, default 5")
    bench.add_argument("--steps", type=int, metavar="N", help="decode steps of a measurement, default 8")
    bench.add_argument(
        "--out", metavar="PREFIX", help="write PREFIX-prefill.csv and PREFIX-decode.csv, for a catalogue"
    )
    bench.add_argument(
        "--device", metavar="NAME", help="say what part of its peak that is; an accelerator of the catalogue"
    )
    bench.add_argument(
        "--catalogue", metavar="FILE", action="append", default=[], help="lay this catalogue over the shipped one"
    )
    bench.add_argument(
        "--cards", type=int, default=1, help="with --device: how many compute together, default %(default)s"
    )
    bench.add_argument(
        "--peak", choices=("bf16", "fp8"), default="bf16", help="with --device: which peak, default %(default)s"
    )
    bench.add_argument(
        "--preset",
        metavar="NAME",
        help="with --device: the model's layout (`regauge layout --list`) or folder, default --model",
    )
    bench.add_argument(
        "--active-b",
        type=float,
        metavar="X",
        help="with --device: 10^9 parameters that a token goes through, default the catalogue's",
    )


_DEFAULTS: Final = {"prompts": (32, 128, 256, 512, 1_024), "batches": (1, 2, 4, 8), "contexts": (128, 512)}


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers with commas, as 32,128,512") from error


def run(options: argparse.Namespace) -> int:
    """Measure, print and perhaps write the curves; return the exit code. Raises ConfigError, EngineError, LayoutError."""
    import asyncio

    from regauge.engines.speeds import Grid

    given = {k: getattr(options, k) for k in (*_DEFAULTS, "rounds", "steps") if getattr(options, k) is not None}
    grid = Grid(**{**_DEFAULTS, **given})
    _check(options)
    efficiency = _efficiency(options) if options.device else None
    speeds = asyncio.run(_remote(options, grid) if options.url else _embedded(options, grid))
    notes = _notes(speeds, grid)
    if options.out is not None:
        notes += _write(options.out, speeds, grid)
    found = efficiency(speeds) if efficiency else None
    if options.json:
        plain = {
            "prefill": _plain(speeds.prefill),
            "decode": _plain(speeds.decode),
            "notes": notes,
            "efficiency": found,
        }
        print(json.dumps(plain, indent=2))
    else:
        print(_text(speeds))
        for note in [*notes, *([found["text"]] if found else [])]:
            print(note)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    alien = ("layout", "threads", "chunk") if options.url else ("key_file", "ids", "answer")
    for name in alien:
        if getattr(options, name) is not None:
            where = "is the embedded engine's: leave it out with --url" if options.url else "needs --url"
            raise ConfigError(f"--{name.replace('_', '-')}: {where}")
    for name, most in (("threads", 1_024), ("chunk", 1 << 20), ("answer", 1 << 22), ("cards", 100_000)):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"--{name} {value}: give a number from 1 to {most:,}")
    if options.url is not None and not re.fullmatch(r"https?://[^/\s]+(/[^\s]*)?", options.url):
        raise ConfigError(f"--url {options.url!r}: give an address as http://127.0.0.1:8000")
    if options.out is not None and not Path(options.out).absolute().parent.is_dir():
        raise ConfigError(f"--out {options.out}: no folder {Path(options.out).absolute().parent}")


# -- what is measured --------------------------------------------------------------------------------------------------


async def _embedded(options: argparse.Namespace, grid: Grid) -> Speeds:
    from regauge.cli_serve import need_engine

    need_engine()
    from regauge.config import BUNDLED_MODEL, EngineConfig, cache_dir
    from regauge.engines.local.model import LocalModel
    from regauge.engines.local.prepare import prepare
    from regauge.engines.local.timed import TimedEngine
    from regauge.engines.speeds import measure
    from regauge.layout.presets import load_named

    folder = prepare(options.model or BUNDLED_MODEL, cache_dir(), _say)
    layout = load_named(options.layout or "bf16,page=16,nhd", str(folder))
    model = LocalModel(folder, options.threads or 0)
    config = EngineConfig(chunk_tokens=options.chunk or EngineConfig().chunk_tokens)
    sizes = {"longest": grid.longest, "tokens": grid.resident, "batch": max(grid.batches)}
    with TimedEngine(model, layout, **sizes, config=config) as engine:
        return await measure(engine, grid, _progress())


async def _remote(options: argparse.Namespace, grid: Grid) -> Speeds:
    import aiohttp

    from regauge.engines.speeds import measure
    from regauge.engines.streaming import TIMEOUT_S, Endpoint, models
    from regauge.engines.timed_server import IDS, TimedServer

    ids = _range(options.ids) if options.ids else IDS
    to = Endpoint(options.url.rstrip("/").removesuffix("/v1"), options.model or "", _key(options.key_file))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        there = await models(session, to)
        if to.model and to.model not in there:
            raise ConfigError(f"--model {to.model!r}: {to.url} has {', '.join(there)}")
        if not to.model and len(there) != 1:
            raise ConfigError(f"--model: {to.url} has {len(there)} models: name one of {', '.join(there)}")
        server = TimedServer(
            session, Endpoint(to.url, to.model or there[0], to.key), ids=ids, answer=options.answer or 0
        )
        return await measure(server, grid, _progress())


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--ids {text!r}: give the first token id and the end, as 1000-10000")
    return int(match[1]), int(match[2])


def _key(path: str | None) -> str:
    if path is None:
        return ""
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {path}: cannot be read: {error}") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"--key-file {path}: holds no key of one line")
    return key


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _progress() -> Callable[[int, int], None]:
    told = 0

    def say(done: int, of: int) -> None:
        nonlocal told
        if done * TOLD // of > told:
            told = done * TOLD // of
            _say(f"measured {done} of {of}")

    return say


# -- what is said of it ------------------------------------------------------------------------------------------------


def _curve(speeds: Speeds, grid: Grid) -> tuple[Timed, ...]:
    """Return the decode steps that the CSV has: of the longest context with two batches or more; of one batch, over the contexts."""
    return speeds.steps(max(grid.contexts)) if len(grid.batches) > 1 else speeds.decode


def _text(speeds: Speeds) -> str:
    lines = ["prompt tokens   seconds  spread   tokens/s"]
    lines += [
        f"{p.tokens:13,.0f} {p.seconds:9.4f} {p.spread:6.1%} {p.tokens / p.seconds:10,.0f}" for p in speeds.prefill
    ]
    lines += ["", "batch  context  resident tokens  seconds a step  spread   tokens/s"]
    lines += [
        f"{p.batch:5} {p.context:8,} {p.tokens:16,.0f} {p.seconds:15.4f} {p.spread:6.1%} {p.batch / p.seconds:10,.1f}"
        for p in speeds.decode
    ]
    return "\n".join(lines)


def _notes(speeds: Speeds, grid: Grid) -> list[str]:
    from regauge.engines.speeds import off
    from regauge.sim.curves import Measured

    notes = []
    chosen = _curve(speeds, grid)
    curve = Measured(tuple(sorted((p.tokens, p.seconds) for p in chosen)))
    for context in grid.contexts:
        others = [p for p in speeds.steps(context) if p not in chosen]
        if others:
            notes.append(
                f"decode curve: the points with context {max(grid.contexts):,}; it misses those with context {context:,} by up to "
                f"{off(others, curve):+.0%}, since a step depends on the batch, too"
            )
    noisy = [p for p in (*speeds.prefill, *speeds.decode) if p.spread > NOISY]
    if noisy:
        notes.append(
            f"{len(noisy)} points spread by more than {NOISY:.0%}: was the machine busy? More --rounds make the medians steadier"
        )
    return notes


def _write(prefix: str, speeds: Speeds, grid: Grid) -> list[str]:
    """Write both curves; return what to say of it. Raises ConfigError."""
    from regauge.engines.speeds import table

    notes = []
    for kind, points in (("prefill", speeds.prefill), ("decode", _curve(speeds, grid))):
        path = Path(f"{prefix}-{kind}.csv")
        try:
            path.write_text(table(points), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {path}: {error.strerror}") from error
        notes.append(f'{kind}_csv = "{path.name}"')
    return notes


def _plain(points: tuple[Timed, ...]) -> list[dict[str, Any]]:
    return [{**asdict(p), "seconds": p.seconds, "spread": p.spread} for p in points]


def _efficiency(options: argparse.Namespace) -> Callable[[Speeds], dict[str, Any]]:
    """Return what says which part of a device's peak the prefill reaches. Raises ConfigError before anything is measured."""
    from regauge.sim import devices
    from regauge.sim.ask import known
    from regauge.sim.model import Point, fit_efficiency
    from regauge.sim.work import model_work

    catalogue = devices.load([Path(each) for each in options.catalogue])
    card = known(catalogue.accelerators, options.device, "--device")
    figure = card.fp8_tflops if options.peak == "fp8" else card.bf16_tflops
    if figure is None:
        raise ConfigError(
            f"--peak {options.peak}: the catalogue has no such rate of {options.device}; add it in a file of your own"
        )
    preset = options.preset or options.model or "smollm2-135m-instruct"
    size = catalogue.models.get(preset)
    active = options.active_b or (size.active_b.value if size and size.active_b else None)
    if active is None:
        raise ConfigError(
            f"--active-b: the catalogue does not have {preset!r}: give 10^9 parameters that a token goes through"
        )
    work = model_work(preset, active * 1e9)
    peak = figure.value * 1e12 * options.cards

    def found(speeds: Speeds) -> dict[str, Any]:
        points = [Point(round(p.tokens), p.tokens / p.seconds) for p in speeds.prefill]
        fitted = fit_efficiency(work, points, peak)
        each = ", ".join(f"{p.tokens:,}: {x:.3g}" for p, x in zip(points, fitted.at, strict=True))
        over = (
            f"; more than the whole peak at {', '.join(f'{points[i].tokens:,}' for i in fitted.impossible)} tokens: another device?"
            if fitted.impossible
            else ""
        )
        text = f"of {options.cards} x {card.name}'s {options.peak} peak: {fitted.fitted.value:.3g} ({each}){over}"
        return {"device": options.device, "peak": peak, **asdict(fitted), "text": text}

    return found
