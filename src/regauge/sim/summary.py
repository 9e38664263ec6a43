"""What a run comes to in a few figures, and several seeds' runs in means with intervals. All simulated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import nan

import msgspec
import numpy as np
from numpy.typing import NDArray

from regauge.errors import ConfigError
from regauge.sim.confidence import Estimate, estimate
from regauge.sim.fleet import Result
from regauge.sim.log import COLUMNS, Log

OUTCOMES = ("complete", "limited", "refused", "failed")
"""Of a request, by its number in the log's column `outcome`: limited is a 429, since it would have come too late."""
SPREAD = ("mean", "p50", "p90", "p99")


class Figures(msgspec.Struct, frozen=True):
    """Seconds of several requests; NaN where there are none."""

    mean: float
    p50: float
    p90: float
    p99: float


class Summary(msgspec.Struct, frozen=True):
    """One run. Of requests after the warm ones: all but `seconds`, `busy` and `ports`, which are of the whole run."""

    requests: int
    outcomes: dict[str, int]
    """Requests by what became of them; `OUTCOMES`."""
    ttft: Figures
    """Seconds from a request's arrival to its first token."""
    tpot: Figures
    """Seconds per output token after the first, of requests with more than one."""
    goodput: float
    """Part of all requests that were served within both limits of the SLO;"""
    goodput_per_s: float
    """such requests per second."""
    requests_per_s: float
    """Completed ones."""
    output_tokens_per_s: float
    hit: float
    """Part of the prompt tokens that were cached."""
    nbytes: float
    """KV bytes that crossed for these requests."""
    seconds: float
    """Of the clock, from 0 to the last end, warm requests included."""
    busy: dict[str, float]
    """Worker -> part of the time that it computed."""
    ports: dict[str, float]
    """Port of the network -> part of what it could carry."""

    @property
    def busiest(self) -> tuple[str, float]:
        """Return the worker or port that was busiest, and how busy."""
        return max([*self.busy.items(), *self.ports.items()], key=lambda each: each[1], default=("nothing", 0.0))


def summarize(result: Result, ttft_s: float, tpot_s: float, warm: int = 0) -> Summary:
    """Return the figures of a run against an SLO, without its first `warm` requests."""
    log = Log(*(getattr(result.log, name)[warm:] for name in COLUMNS))
    done, window = log.complete, _window(log)
    ttft, tokens = (log.first - log.at)[done], log.output[done]
    # A request of one token has no time per token, and breaks no limit of it.
    good = (ttft <= ttft_s) & ((tokens < 2) | ((log.ended - log.first)[done] <= tpot_s * (tokens - 1)))
    return Summary(
        requests=len(log),
        outcomes={name: int(np.sum(log.outcome == code)) for code, name in enumerate(OUTCOMES)},
        ttft=figures(log.ttft()),
        tpot=figures(log.tpot()),
        goodput=float(good.sum()) / max(1, len(log)),
        goodput_per_s=float(good.sum()) / window,
        requests_per_s=float(done.sum()) / window,
        output_tokens_per_s=float(tokens.sum()) / window,
        hit=float(log.cached[done].sum()) / max(1.0, float(log.prompt[done].sum())),
        nbytes=float(np.nansum(log.nbytes)),
        seconds=result.seconds,
        busy={name: busy / result.seconds for name, busy in result.busy.items()},
        ports={port: result.carried[port] / result.seconds / rate for port, rate in result.ports.items() if rate > 0},
    )


def figures(values: NDArray[np.float64]) -> Figures:
    """Return mean and percentiles (linear between ranks) of seconds; NaN of none."""
    if not len(values):
        return Figures(nan, nan, nan, nan)
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Figures(float(values.mean()), float(p50), float(p90), float(p99))


def _window(log: Log) -> float:
    """Seconds from the first counted arrival to the last counted end, or arrival."""
    if not len(log):
        return 1e-9
    last = np.nanmax(np.concatenate([log.at, log.ended]))
    return max(float(last - log.at.min()), 1e-9)


class Pooled(msgspec.Struct, frozen=True):
    """Several seeds' runs of one case: each figure's mean over seeds with its interval, under the name in `flat`."""

    case: str
    seeds: int
    figures: dict[str, Estimate]


def flat(summary: Summary) -> dict[str, float]:
    """Return the figures that are compared, by name."""
    rows = {f"{what}_{which}": getattr(getattr(summary, what), which) for what in ("ttft", "tpot") for which in SPREAD}
    rows |= {
        name: getattr(summary, name)
        for name in ("goodput", "goodput_per_s", "requests_per_s", "output_tokens_per_s", "hit", "nbytes")
    }
    rows |= {name: float(summary.outcomes[name]) for name in OUTCOMES[1:]}
    prefill, decode = ([v for k, v in summary.busy.items() if k.startswith(kind)] for kind in "pd")
    inward = [share for name, share in summary.ports.items() if re.match(r"d\d", name)]
    for name, values in (("prefill_busy", prefill), ("decode_busy", decode), ("decode_nics", inward)):
        rows[name] = float(np.mean(values)) if values else nan
    return rows


def pooled(case: str, summaries: Sequence[Summary]) -> Pooled:
    """Return a case's figures over its seeds; those that some run does not have (no request came so far) are left out.

    Raises ConfigError for no runs.
    """
    if not summaries:
        raise ConfigError(f"{case}: no runs")
    rows = [flat(summary) for summary in summaries]
    names = [name for name in rows[0] if all(np.isfinite(row[name]) for row in rows)]
    return Pooled(case, len(rows), {name: estimate([row[name] for row in rows]) for name in names})
