"""The quality gate on the command line: options of `bench accuracy`, `bench keygen`, `bench sign` and of `check`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.engines.local.accuracy import Case, Measured
    from regauge.layout.spec import Layout
    from regauge.plan import Verdict

_SCALES = ("none", "per-tensor", "per-head", "per-token-head")
_LIMITS = ("max_kl", "min_agreement", "max_perplexity_ratio", "min_positions")


def accuracy_arguments(bench: argparse.ArgumentParser, layout_help: str) -> None:
    """Add what `bench accuracy` takes."""
    bench.add_argument(
        "--model", default="smollm2-135m-instruct", help="the bundled model's name, a folder, or a hub name"
    )
    bench.add_argument(
        "--prefill-layout", action="append", metavar="LAYOUT", help=layout_help + "; may be given several times"
    )
    bench.add_argument("--decode-layout", action="append", metavar="LAYOUT", help="as many times as --prefill-layout")
    bench.add_argument(
        "--text", metavar="FILE", help="plain text to measure on, documents apart by blank lines; default: shipped"
    )
    bench.add_argument(
        "--prompt-tokens", type=int, default=256, help="tokens of each document that cross, default %(default)s"
    )
    bench.add_argument(
        "--answer-tokens", type=int, default=64, help="teacher-forced tokens after them, default %(default)s"
    )
    bench.add_argument("--threads", type=int, help="of the model, default one per core")
    bench.add_argument("--from", dest="source", metavar="DTYPE", help="dtype of the prefill side, such as bf16")
    bench.add_argument("--to", dest="target", metavar="DTYPE", help="dtype of the decode side, such as fp8_e4m3")
    bench.add_argument(
        "--scale", choices=_SCALES,
        help="scales of the 8-bit sides of --from and --to; constant ones are calibrated on documents that are not evaluated",
    )  # fmt: skip
    bench.add_argument("--rule", metavar="NAME", help="how codes are made with a scale: reciprocal, divide, ...")
    bench.add_argument("--matrix", action="store_true", help="measure the usual targets, and two deliberate mistakes")
    bench.add_argument("--revision", default="", help="commit or digest of the weights that the record is of")
    bench.add_argument("--record", metavar="FILE", help="write the quality record of the one pair that is measured")
    bench.add_argument("--sign", metavar="KEY", help="sign the record with this Ed25519 key (see `bench keygen`)")
    bench.add_argument(
        "--layouts", metavar="DIR", help="write the measured pair, calibrated scales included, as prefill.toml and decode.toml"
    )  # fmt: skip


def keygen_arguments(bench: argparse.ArgumentParser) -> None:
    """Add what `bench keygen` takes."""
    bench.add_argument("--sign", metavar="KEY", help="file of the private key; KEY.pub is the public one")


def sign_arguments(bench: argparse.ArgumentParser) -> None:
    """Add what `bench sign` takes."""
    bench.add_argument("--record", metavar="FILE", help="the record, which is signed in place")
    bench.add_argument("--sign", metavar="KEY", help="the Ed25519 key (see `bench keygen`)")


def check_arguments(check: argparse.ArgumentParser) -> None:
    """Add what `check --require-quality` takes."""
    check.add_argument(
        "--require-quality", metavar="RECORD", action="append", default=[],
        help="refuse a pair that converts unless this record, or another given so, covers it; see `regauge bench accuracy`",
    )  # fmt: skip
    check.add_argument(
        "--trust", metavar="PUBKEY", action="append", default=[], help="public key whose signature on a record counts"
    )
    check.add_argument(
        "--max-kl", type=float, help="most nats of mean KL divergence; default: that of [quality.limits]"
    )
    check.add_argument("--min-agreement", type=float, help="least share of equal next tokens")
    check.add_argument("--max-perplexity-ratio", type=float, help="most perplexity, as a multiple of each control's")
    check.add_argument("--min-positions", type=int, help="fewest positions that must have been measured")


def judge(options: argparse.Namespace, prefill: Layout, decode: Layout) -> Verdict:
    """Compare two layouts, with the quality gate where the options demand it. Raises ConfigError."""
    from regauge.plan import check

    given = {name: getattr(options, name) for name in _LIMITS if getattr(options, name) is not None}
    if not options.require_quality:
        if options.trust or given:
            raise ConfigError("--trust and limits need --require-quality RECORD")
        return check(prefill, decode)
    if not options.trust:
        raise ConfigError("--require-quality needs --trust PUBKEY: whose signature counts?")
    from regauge.config import QualityLimits
    from regauge.serve import quality_gate

    return quality_gate.read(options.require_quality, options.trust, QualityLimits(**given)).check(prefill, decode)


def keygen(options: argparse.Namespace) -> list[Path]:
    """Make a key pair; return its files, private first."""
    from regauge import keys

    if options.sign is None:
        raise ConfigError("bench keygen needs --sign KEY: where to write the private key; KEY.pub is the public one")
    path = Path(options.sign)
    return [path, keys.generate(path)]


def sign(options: argparse.Namespace) -> Path:
    """Sign an existing record in place; return its file."""
    from regauge import keys
    from regauge.plan import quality

    if options.record is None or options.sign is None:
        raise ConfigError("bench sign needs --record FILE and --sign KEY")
    path = Path(options.record)
    signed = quality.decode(keys.read_bounded(path, quality.MAX_BYTES), str(path))
    _write(path, quality.encode(quality.sign(signed.record, keys.load_private(Path(options.sign)))))
    return path


def accuracy(options: argparse.Namespace) -> tuple[list[Any], str]:
    """Measure; write record and layouts where asked for; return the rows as plain values, and as text."""
    import msgspec

    from regauge import keys
    from regauge.engines.local import accuracy as bench

    cases = _cases(options)
    if (options.record or options.layouts) and len(cases) != 1:
        raise ConfigError("--record and --layouts are of one pair: give --from and --to, or one pair of layouts")
    if options.sign and not options.record:
        raise ConfigError("--sign needs --record FILE")
    key = keys.load_private(Path(options.sign)) if options.sign else None  # before minutes of work
    if options.threads is not None and not 1 <= options.threads <= 1024:
        raise ConfigError(f"--threads {options.threads}: give a number from 1 to 1024")
    setting = bench.Setting(options.model, options.text, options.prompt_tokens, options.answer_tokens, options.revision,
                            options.threads or 0)  # fmt: skip
    found = bench.measure(setting, cases, lambda line: print(line, file=sys.stderr, flush=True))
    if options.layouts:
        _write_layouts(Path(options.layouts), found[0])
    if options.record:
        _write_record(Path(options.record), found[0], key)
    return json.loads(msgspec.json.encode([m.row for m in found])), bench.table(found)


def _cases(options: argparse.Namespace) -> Sequence[Case]:
    from typing import get_args

    from regauge.engines.local import accuracy as bench
    from regauge.layout.spec import Rule

    rule = options.rule
    if rule is not None and rule not in get_args(Rule):
        raise ConfigError(f"--rule {rule!r}: choose {', '.join(get_args(Rule))}")
    if options.matrix:
        if options.source or options.target or options.prefill_layout or options.decode_layout or options.scale or rule:
            raise ConfigError("--matrix chooses the pairs itself: give it alone")
        return bench.MATRIX
    dtypes = (options.source, options.target)
    return bench.from_options(options.prefill_layout, options.decode_layout, dtypes, options.scale, rule)


def _write_record(path: Path, measured: Measured, key: Any) -> None:
    from datetime import UTC, datetime

    from regauge.engines.local.accuracy import record
    from regauge.plan import quality

    plain = record(measured, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    _write(path, quality.encode(quality.sign(plain, key) if key is not None else quality.Signed(plain)))


def _write_layouts(folder: Path, measured: Measured) -> None:
    from regauge.layout import files

    for name, layout in (("prefill", measured.prefill), ("decode", measured.decode)):
        _write(folder / f"{name}.toml", files.encode(layout, format="toml"))


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
