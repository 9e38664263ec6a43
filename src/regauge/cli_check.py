"""The verb `check`: one pair of layouts, or all ranks of two sides."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from regauge import cli_quality
from regauge.errors import ConfigError, PlanError, Refused

if TYPE_CHECKING:
    from regauge.layout.spec import Layout
    from regauge.plan import Verdict
    from regauge.plan.ranks import Crossing

Load = Callable[[str], "Layout"]


def check(options: argparse.Namespace, load: Load) -> int:
    """Say which path two sides take; return the exit code. Raises ConfigError, LayoutError.

    A side is one layout, which stands for its tensor- and context-parallel ranks, or a folder with a layout file per rank.
    Of several pairs of ranks, the one whose path asks most is shown.
    """
    from regauge.plan.check import worst

    prefill, decode = _side(options.prefill, load), _side(options.decode, load)
    pairs, note = _pairs(prefill, decode)
    found = [(c, cli_quality.judge(options, prefill[c.prefill], decode[c.decode])) for c in pairs]
    verdicts = [v for _, v in found] or [cli_quality.judge(options, prefill[0], decode[0])]
    path = worst(v.path for v in verdicts)
    verdict = next(v for v in verdicts if v.path == path)
    if isinstance(note, Refused):
        path = "REFUSED"
    reasons = list(note.reasons) if isinstance(note, Refused) else []
    if options.json:
        ranks = [{"prefill": c.prefill, "decode": c.decode, "path": v.path, "heads": _heads(c)} for c, v in found]
        print(json.dumps(asdict(verdict) | {"path": path, "ranks": ranks, "unpaired": reasons}, indent=2))
    else:
        _print(path, verdict, reasons)
        if isinstance(note, PlanError):
            print(f"  note: ranks are not paired: {note}")
        elif len(prefill) * len(decode) > 1 and found and path != "REFUSED":
            print(f"  ranks: {len(prefill)} prefill, {len(decode)} decode; {len(found)} pairs of them carry something")
    return 1 if path in ("REFUSED", "NONE") else 0


def _side(text: str, load: Load) -> list[Layout]:
    folder = Path(text)
    if folder.is_dir():
        files = sorted(x for x in folder.iterdir() if x.suffix in (".toml", ".json"))
        if not files:
            raise ConfigError(f"{text} has no layout file (.toml, .json): one per rank is expected")
        return [load(str(x)) for x in files]
    layout = load(text)
    from regauge.plan.ranks import ranks

    try:
        return ranks(layout)
    except PlanError:
        return [layout]  # `_pairs` says what is missing


def _pairs(prefill: Sequence[Layout], decode: Sequence[Layout]) -> tuple[list[Crossing], Refused | PlanError | None]:
    from regauge.plan import check as judged
    from regauge.plan.ranks import crossings, ranks

    if judged(prefill[0], decode[0]).path == "REFUSED":
        return [], None  # said in full by the verdict of this pair
    try:
        for side in (prefill, decode):
            if len(side) == 1:
                ranks(side[0])
        return crossings(prefill, decode), None
    except (Refused, PlanError) as error:
        return [], error


def _heads(crossing: Crossing) -> dict[str, list[int]]:
    return {lane.name: list(lane.heads) for lane in crossing.plan.lanes}


def _print(path: str, verdict: Verdict, unpaired: Sequence[str]) -> None:
    print(path)
    for line in (*verdict.reasons, *map(str, verdict.refusals), *unpaired):
        print(f"  {line}")
    for note in verdict.notes:
        print(f"  note: {note}")
