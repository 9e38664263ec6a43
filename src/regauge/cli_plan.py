"""The verb `plan`: what servers a workload needs, and what they do with it. Heavy imports are in the verb: `--help` answers at once."""

from __future__ import annotations

import argparse
import json
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from regauge.sim.ask import Ask
    from regauge.sim.devices import Catalogue
    from regauge.sim.money import Money
    from regauge.sim.plan_result import Plan
    from regauge.sim.plan_run import Simulated
    from regauge.sim.workload import Workload

_POOL = (
    "DEVICE[:SERVERS][,NAME=VALUE...], such as mtt-s5000:12,weights=4.5; servers are found where none are given; names: span, cards, "
    "nic, nics, rails, copies, weights, compute, memory, overhead, step-overhead, reserve"
)
_NEEDED = ("model", "prefill", "decode", "ttft", "tpot")
_OWN = (*_NEEDED, "parameters", "prefill_kv", "decode_kv", "trace", "input_tokens", "output_tokens", "rate", "hit", "simulate", "cost", "price", "prices", "plot")  # fmt: skip
"""What is of a question, and of nothing else."""


def arguments(plan: argparse.ArgumentParser) -> None:
    """Add what `plan` takes."""
    plan.add_argument("what", nargs="?", choices=("article", "devices"), metavar="WHAT",
                      help="article: the published deployment, questioned; devices: the catalogue with its sources; none: size what the options say")  # fmt: skip
    question = plan.add_argument_group("who serves")
    question.add_argument(
        "--model",
        metavar="NAME",
        help="a shipped name (`regauge layout --list`), a Hugging Face folder, or a config.json",
    )
    question.add_argument(
        "--parameters", metavar="TOTAL:ACTIVE", help="in 10^9, of a model that the catalogue does not have"
    )
    question.add_argument("--prefill", metavar="POOL", help=_POOL)
    question.add_argument("--decode", metavar="POOL", help="the same, of the decode side")
    question.add_argument(
        "--kv",
        metavar="LAYOUT",
        default="fp8_e4m3,page=64",
        help="layout of the KV cache on both sides, default %(default)s",
    )
    question.add_argument("--prefill-kv", metavar="LAYOUT", help="on the prefill side")
    question.add_argument("--decode-kv", metavar="LAYOUT", help="on the decode side")
    question.add_argument("--switch", metavar="NAME", default="128x400g", help="of the catalogue, default %(default)s")
    question.add_argument("--fit", metavar="TOKENS:RATE[:HIT]", action="append", default=[],
                          help="a prefill rate of one server, to which its efficiency is fitted; may be given again")  # fmt: skip
    load = plan.add_argument_group("what comes")
    load.add_argument("--trace", metavar="FILE", help="requests of a published trace")
    load.add_argument("--format", metavar="NAME", default="auto", help="the trace's; default: found out")
    load.add_argument(
        "--input-tokens", metavar="MEAN[:P99]", help="of a prompt, cached ones counted; with a P99: log-normal"
    )
    load.add_argument("--output-tokens", metavar="MEAN[:P99]", help="of an answer")
    load.add_argument("--rate", type=float, metavar="X", help="requests per second; default: the trace's")
    load.add_argument(
        "--hit",
        type=float,
        metavar="SHARE",
        help="of prompts that is cached, 0 to 1; default: what the trace's blocks say",
    )
    load.add_argument(
        "--cache-tokens",
        type=float,
        default=inf,
        metavar="N",
        help="size of the cache that those are counted with; default: endless",
    )
    load.add_argument(
        "--delta", action="store_true", help="decode keeps the prompts' beginnings: only what is not cached crosses"
    )
    load.add_argument(
        "--chunk-tokens", type=int, default=8192, metavar="N", help="of a prefill step, default %(default)s"
    )
    asked = plan.add_argument_group("what is asked")
    asked.add_argument("--ttft", type=float, metavar="S", help="seconds to the first token")
    asked.add_argument("--tpot", type=float, metavar="S", help="seconds per token after it")
    asked.add_argument(
        "--share",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of requests that keep to both, default %(default)s: the 90th percentiles",
    )
    asked.add_argument("--sure", action="store_true", help="count servers at the pessimistic end of every constant")
    asked.add_argument("--no-what-if", action="store_true", help="leave out the table of changes")
    asked.add_argument(
        "--simulate",
        type=int,
        metavar="N",
        help="also run so many requests through the simulator, with the real router",
    )
    files = plan.add_argument_group("files")
    files.add_argument(
        "--catalogue", metavar="FILE", action="append", default=[], help="devices of yours; may be given again"
    )
    files.add_argument("--cost", metavar="FILE", help="what converting costs, as `bench calibrate` writes it")
    files.add_argument(
        "--price", metavar="MODEL", help="list price that revenue is counted by; default: the model's, if listed"
    )
    files.add_argument("--prices", metavar="FILE", help="a price book (`regauge prices`) in place of list prices")
    files.add_argument("--markdown", metavar="FILE", help="write the report")
    files.add_argument("--plot", metavar="FILE", help="write a picture, .png or .svg")


def run(options: argparse.Namespace) -> int:
    """Answer; return the exit code: 0 it fits, 1 it does not. Raises ConfigError, LayoutError; Refused for what cannot fit."""
    from regauge.sim.devices import load

    _refuse_unused(options)
    catalogue = load([Path(x) for x in options.catalogue])
    if options.what == "devices":
        return _devices(options, catalogue)
    if options.what == "article":
        return _article(options, catalogue)
    from regauge.sim.answer import answer

    plan = answer(_ask(options, catalogue), changes=not options.no_what_if)
    money, run = _money(options, plan), _simulated(options, plan)
    written = _written(options, plan, money)
    if options.json:
        from regauge.sim.plan_json import plain

        print(json.dumps(plain(plan, money, run), indent=2))
    else:
        from regauge.cli_plan_view import show

        show(plan, money, run, written)
    return 0 if plan.fits else 1


def _refuse_unused(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that would be passed over."""
    if options.what is not None:
        given = [f"--{name.replace('_', '-')}" for name in _OWN if getattr(options, name) is not None]
        if options.what == "devices" and options.markdown is not None:
            given.append("--markdown")
        if given:
            raise ConfigError(
                f"plan {options.what}: takes no {', '.join(given)}; leave {options.what!r} out to ask a question"
            )
    elif options.trace is None and (options.format != "auto" or options.cache_tokens != inf):
        raise ConfigError("--format and --cache-tokens are of a trace: give --trace FILE, or leave them out")


def _ask(options: argparse.Namespace, catalogue: Catalogue) -> Ask:
    from regauge.sim import pool_form
    from regauge.sim.ask import Ask, Slo

    missing = [f"--{name}" for name in _NEEDED if getattr(options, name) is None]
    if missing:
        raise ConfigError(
            f"give {', '.join(missing)}, and a workload: --trace FILE, or --input-tokens, --output-tokens and --rate"
        )
    more: dict[str, Any] = {}
    if options.parameters is not None:
        more["total_b"], more["active_b"] = pool_form.parameters(options.parameters, "--parameters")
    if options.cost is not None:
        from regauge.move.costs import read

        more["kernels"] = read(Path(options.cost))
    prefill, decode = (
        pool_form.pool(getattr(options, side), f"--{side}", getattr(options, f"{side}_kv") or options.kv)
        for side in ("prefill", "decode")
    )
    return Ask(
        options.model, prefill, decode, _workload(options), Slo(options.ttft, options.tpot, options.share), options.switch, catalogue,
        chunk_tokens=options.chunk_tokens, sure=options.sure, delta=options.delta,
        points=tuple(pool_form.point(text, "--fit") for text in options.fit), **more,
    )  # fmt: skip


def _workload(options: argparse.Namespace) -> Workload:
    from regauge.sim import trace, workload
    from regauge.sim.pool_form import lengths

    made = (options.input_tokens, options.output_tokens)
    if options.trace is not None:
        if any(x is not None for x in made):
            raise ConfigError("give --trace, or --input-tokens and --output-tokens, not both")
        read = trace.read(Path(options.trace), form=options.format)
        return workload.of_trace(read, rate=options.rate, hit=options.hit, cache_tokens=options.cache_tokens)
    if None in made or options.rate is None:
        raise ConfigError("a workload: give --trace FILE, or --input-tokens, --output-tokens and --rate")
    prompt, output = lengths(made[0], "--input-tokens"), lengths(made[1], "--output-tokens")
    return workload.of_lengths(prompt, output, options.rate, hit=options.hit or 0.0)


def _simulated(options: argparse.Namespace, plan: Plan) -> Simulated | None:
    """The plan's servers in the simulator, if that was asked for."""
    if options.simulate is None:
        return None
    from regauge.sim import trace
    from regauge.sim.plan_run import simulate

    prefixes = options.trace is not None and options.hit is None
    return simulate(
        plan, options.simulate, trace=trace.read(Path(options.trace), form=options.format) if prefixes else None
    )


def _money(options: argparse.Namespace, plan: Plan) -> Money | None:
    """A month's revenue and cost at the price that was named, else at the model's list price; none if there is none."""
    from regauge.sim.ask import known
    from regauge.sim.money import of_plan
    from regauge.sim.revenue import listed, of_book

    if options.prices is not None:
        from regauge.meter.prices import read

        return of_plan(plan, of_book(read(Path(options.prices)), options.price or options.model))
    if options.price is not None:
        return of_plan(plan, known(listed(), options.price, "--price", "list prices", "--prices FILE gives your own"))
    return of_plan(plan, listed()[options.model]) if options.model in listed() else None


def _written(options: argparse.Namespace, plan: Plan, money: Money | None) -> list[Path]:
    """Write picture and report; return their paths."""
    pictures = []
    if options.plot is not None:
        from regauge.sim.plan_charts import loads, what_if

        path = Path(options.plot)
        if path.suffix not in (".png", ".svg"):
            raise ConfigError(f"--plot {path}: name a .png or .svg file")
        drawn = [(loads, "What each constraint asks for", path)]
        if plan.what_if:
            drawn.append((what_if, "What if", path.with_stem(path.stem + "-what-if")))
        for draw, caption, at in drawn:
            try:
                draw(at, plan)
            except OSError as error:
                raise ConfigError(f"--plot {at}: {error.strerror}") from error
            pictures.append((caption, at))
    if options.markdown is not None:
        from regauge.sim import report

        try:
            Path(options.markdown).write_text(report.plan(plan, money, pictures), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--markdown {options.markdown}: {error.strerror}") from error
    return [path for _, path in pictures] + ([Path(options.markdown)] if options.markdown is not None else [])


def _article(options: argparse.Namespace, catalogue: Catalogue) -> int:
    """The published deployment: a summary here, all of it in --markdown."""
    from regauge.sim.article import article
    from regauge.sim.article_report import short, write

    found = article(catalogue)
    written = write(found, Path(options.markdown)) if options.markdown is not None else []
    if options.json:
        from regauge.sim.plan_json import plain

        answers = [
            {"question": each.what, "tokens": each.tokens, "claimed": each.claimed, **plain(each.plan)}
            for each in found.planned
        ]
        print(json.dumps({"modelled": True, "summary": short(found), "plans": answers}, indent=2))
        return 0
    from regauge.cli_plan_view import show_article

    show_article(short(found), found.planned, written)
    return 0


def _devices(options: argparse.Namespace, catalogue: Catalogue) -> int:
    import msgspec

    if options.json:
        print(json.dumps(msgspec.to_builtins(catalogue), indent=2))
        return 0
    from regauge.cli_plan_view import show_devices

    show_devices(catalogue)
    sys.stdout.flush()
    return 0
