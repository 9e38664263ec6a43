"""The command line's verbs about cost: `explain` and `bench calibrate`. Heavy imports are in the verbs: `--help` answers at once."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from regauge.layout.spec import Layout


def explain_arguments(explain: argparse.ArgumentParser) -> None:
    """Add what `explain` takes besides a pair of layouts."""
    explain.add_argument("--link", metavar="RATE", help="rate of the link, such as 400G (bits per second)")
    explain.add_argument(
        "--transport",
        metavar="NAME",
        help="how KV crosses: shm, tcp, rdma, or mooncake and nixl over tcp; default rdma with --link, else tcp",
    )
    explain.add_argument("--cost", metavar="FILE", help="the cost model's constants, as `bench calibrate` writes them")
    explain.add_argument("--chunk-tokens", type=int, default=256, help="tokens of one write, default %(default)s")
    explain.add_argument("--slot-bytes", type=int, default=4 << 20, help="bytes of a staging slot, default %(default)s")
    explain.add_argument("--svg", metavar="FILE", help="also draw which bytes of one page go where")


def calibrate_arguments(bench: argparse.ArgumentParser) -> None:
    """Add what `bench calibrate` takes."""
    bench.add_argument("--out", metavar="FILE", help="write the constants here, for --cost and transfer.costs")
    bench.add_argument("--threads", type=int, default=1, help="threads of the kernels, default %(default)s")


def explain(options: argparse.Namespace, prefill: Layout, decode: Layout) -> int:
    """Explain a pair; return the exit code. Raises ConfigError, Refused, PlanError."""
    from regauge.plan.cost import DEFAULTS, Setting
    from regauge.plan.explain import explain as explained
    from regauge.plan.picture import svg

    for name, most in (("tokens", 1 << 24), ("chunk_tokens", 1 << 24), ("slot_bytes", 1 << 40)):
        if not 1 <= getattr(options, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: give a number from 1 to {most}")
    link = _gigabits(options.link)
    constants = DEFAULTS
    if options.cost is not None:
        from regauge.move.costs import read

        constants = read(Path(options.cost))
    transport = options.transport or ("tcp" if link is None else "rdma")
    setting = Setting(transport, (link or 0.0) * 1e9 / 8, options.chunk_tokens, options.slot_bytes)
    found = explained(prefill, decode, tokens=options.tokens, link_gbps=link, constants=constants, setting=setting)
    if options.svg is not None:
        try:
            Path(options.svg).write_text(svg(prefill, decode))
        except OSError as error:
            raise ConfigError(f"--svg {options.svg}: {error.strerror}") from error
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(found.text())
    return 0


def _gigabits(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9.]+)\s*([MGT]?)", text.strip(), re.IGNORECASE)
    try:
        rate = float(match[1]) * {"M": 1e-3, "": 1e-9, "G": 1.0, "T": 1e3}[match[2].upper()] if match else 0.0
    except ValueError:
        rate = 0.0
    if not 0 < rate < inf:
        raise ConfigError(f"--link {text!r}: give bits per second, such as 25G or 400G")
    return rate


def calibrate(options: argparse.Namespace) -> int:
    """Measure the cost model's constants; print and perhaps write them. Raises ConfigError, TransportError."""
    import msgspec

    from regauge.move.calibrate import measure
    from regauge.move.costs import write
    from regauge.plan import cost

    if not 1 <= options.threads <= 1024:
        raise ConfigError(f"--threads {options.threads}: give a number from 1 to 1024")
    found = measure(threads=options.threads, say=lambda what: print(f"measuring {what}", file=sys.stderr, flush=True))
    if options.out is not None:
        write(Path(options.out), found)
    if options.json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        sys.stdout.write(cost.encode(found).decode())
    return 0
