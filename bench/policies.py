"""All routing policies with all flow controls on four real traces. SIMULATED workers and network; the gateway's own router and flow control.

    python bench/policies.py --traces FOLDER [--requests N] [--seeds N] [--only WORD] [--transfers fluid] [--markdown FILE] [--json]

FOLDER holds mooncake_conversation.jsonl and mooncake_synthetic.jsonl (kvcache-ai/Mooncake, FAST25-release/traces), azure2023_code.csv
(Azure/AzurePublicDataset) and weka_agent_compact.jsonl (of callanjfox/kv-cache-tester); what is not there is left out, and said so.

12 prefill workers (prefix caches of 1,024,000 tokens) and 4 decode workers with 2 NICs each. Each seed has another part of the trace, of Azure's twice as long. Rates are set once for
a trace, by the mean of its parts: decode's NICs have the load that the table says, prefill 0.7 of it, if as much is cached as an endless cache would have; both over the middle nine
tenths of a part's tokens, of requests that come as if each were served at once. Mooncake's ticks of 3 s are spread at random by seed. Of agents' sessions there are the first 4 turns;
think times are cut to 30 s, so that a few sessions overlap as many would; sessions begin at random by seed, and each turn waits for the answer before it and its think time. The first
three tenths of the requests fill the caches and are not counted.

x ± y: mean of the seeds and half of its 95 % interval (Student's t). "over": mean TTFT over that of network-aware routing with credit, mean of the seeds' ratios; all
policies of one seed see the same requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from harness import write_json
from regauge.config import RouteConfig
from regauge.move.flow_types import POLICIES as FLOWS
from regauge.move.flow_types import Policy
from regauge.route.policies import POLICIES
from regauge.sim.cluster import Cluster, Level
from regauge.sim.confidence import Estimate, estimate
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.fleet import Fleet
from regauge.sim.summary import Pooled, Summary, pooled, summarize
from regauge.sim.trace import BLOCK, Arrival, Trace, read
from regauge.sim.trace_shape import dequantised, parse_slice, scaled, sliced, staggered
from regauge.sim.trace_stats import hit

PREFILL_LOAD = 0.7
"""Over that of decode's NICs."""
TURNS, THINK_S = 4, 30.0
WARM = 0.3
OURS = "network-aware, credit"
SERVICE_S = 2.0
"""What a turn is taken to last where loads are computed."""


@dataclasses.dataclass(frozen=True)
class Study:
    """One trace, and what is good service of it."""

    file: str
    what: str
    ttft_s: float
    load: float
    """Of decode's NICs. Of a trace that comes in bursts many times its mean, low."""
    scale: float = 1.0
    sessions_per_s: float = 0.0
    """Of a trace whose sessions have no begin of their own."""
    tpot_s: float = 0.1
    longer: int = 1
    """Times as many requests."""


STUDIES = (
    Study("mooncake_conversation.jsonl", "conversations (Mooncake)", 3.0, 0.8, scale=5.0),
    Study("mooncake_synthetic.jsonl", "synthetic (Mooncake)", 3.0, 0.8, scale=4.0),
    Study("azure2023_code.csv", "code completion (Azure 2023)", 1.0, 0.5, scale=5.0, longer=2),
    Study("weka_agent_compact.jsonl", "agents' sessions (Weka)", 10.0, 0.4, sessions_per_s=10.0),
)


def part(study: Study, trace: Trace, seed: int, count: int) -> Trace:
    """Return the seed's part of a trace, from seed 1 on; of sessions, their first turns."""
    if not study.sessions_per_s:
        return dequantised(sliced(trace, parse_slice(f"{(seed - 1) * count}:{seed * count}r")), seed)
    turns: list[int] = []
    kept: list[int] = []
    for place, each in enumerate(trace.arrivals):
        turns.append(0 if each.after < 0 else turns[each.after] + 1)
        if turns[place] < TURNS:
            kept.append(place)
    new = {old: place for place, old in enumerate(kept)}
    first = tuple(
        dataclasses.replace(each, after=new.get(each.after, -1), think_s=min(each.think_s, THINK_S))
        for each in (trace.arrivals[old] for old in kept)
    )
    own = sliced(dataclasses.replace(trace, arrivals=first), parse_slice(f"{(seed - 1) * count}:{seed * count}r"))
    return staggered(own, study.sessions_per_s, seed)


def tokens_per_s(given: Sequence[Arrival]) -> float:
    """Return prompt tokens a second over the middle nine tenths of the tokens, each turn served in SERVICE_S."""
    at: list[float] = []
    for each in given:
        at.append(each.at if each.after < 0 else at[each.after] + SERVICE_S + each.think_s)
    order = np.argsort(at)
    times = np.asarray(at)[order]
    total = np.cumsum([given[i].tokens for i in order])
    first, last = np.searchsorted(total, (0.05 * total[-1], 0.95 * total[-1]))
    return float((total[last] - total[first]) / max(times[last] - times[first], 1e-9))


def cluster(parts: Sequence[Trace], load: float, transfers: Level) -> Cluster:
    """Return 12 + 4 workers with the loads of the docstring, for these parts of a trace."""
    base, block = Cluster(decode_nics=2), parts[0].block
    tokens = statistics.fmean(tokens_per_s(each.arrivals) for each in parts)
    cached = statistics.fmean(hit(each.arrivals, block) for each in parts) if block else 0.0
    nic = tokens * base.bytes_per_token / base.decodes / base.decode_nics / load
    return dataclasses.replace(
        base,
        prefill=PrefillModel(
            tokens * (1 - cached) / base.prefills / (PREFILL_LOAD * load),
            cache_blocks=2_000 * BLOCK // (block or BLOCK),
        ),
        decode=DecodeModel(slots=256, pages=400_000),
        decode_nic=nic,
        prefill_nic=4 * nic,
        transfers=transfers,
        block=block or BLOCK,
    )


def run(policy: str, flow: Policy, shape: Cluster, given: Sequence[Arrival], seed: int, study: Study) -> Summary:
    """Serve the arrivals."""
    config = RouteConfig(policy=policy, block_tokens=shape.block)  # type: ignore[arg-type]
    result = Fleet(dataclasses.replace(shape, flow_policy=flow), config, seed).run(given)
    return summarize(result, study.ttft_s, study.tpot_s, int(WARM * len(given)))


def measure(
    study: Study, trace: Trace, count: int, seeds: int, transfers: Level
) -> tuple[list[Pooled], dict[str, Estimate], str]:
    """Return each case's figures, its mean TTFT over ours, and what was simulated."""
    flows = FLOWS if transfers != "fluid" else FLOWS[:1]
    cases = list(itertools.product(POLICIES, flows))
    runs: dict[str, list[Summary]] = {f"{policy}, {flow.name}": [] for policy, flow in cases}
    count *= study.longer
    parts = [part(study, trace, seed, count) for seed in range(1, seeds + 1)]
    shape = cluster(parts, study.load, transfers)
    for seed, own in enumerate(parts, 1):
        for policy, flow in cases:
            runs[f"{policy}, {flow.name}"].append(run(policy, flow, shape, own.arrivals, seed, study))
    ours = [summary.ttft.mean for summary in runs[OURS]]
    over = {
        case: estimate([each.ttft.mean / own for each, own in zip(summaries, ours, strict=True)])
        for case, summaries in runs.items()
    }
    told = (
        f"{study.what}: {count:,} requests, NICs at {study.load:g} ({shape.decode_nic / 1e9:.2g} GB/s), "
        f"prefill at {PREFILL_LOAD * study.load:.2g} ({shape.prefill.tokens_per_s:,.0f} tokens/s), "
        f"SLO: TTFT {study.ttft_s:g} s, TPOT {study.tpot_s * 1e3:g} ms"
    )
    return [pooled(case, summaries) for case, summaries in runs.items()], over, told


def markdown(told: str, rows: Sequence[Pooled], over: dict[str, Estimate], seeds: int) -> str:
    """Return a trace's table."""
    heads = ("routing, flow control", "TTFT mean, s", "P90, s", "P99, s", "over", "TPOT, ms", "goodput, %", "hits, %", "KV moved, TB")  # fmt: skip
    lines = [f"### Simulated, {told}, {seeds} seeds", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for each in rows:
        found = each.figures
        cells = [text(found[f"ttft_{which}"]) for which in ("mean", "p90", "p99")]
        cells += [text(over[each.case]), text(found["tpot_mean"], 1e3, 1)]
        cells += [text(found[name], 100, 1) for name in ("goodput", "hit")]
        cells.append(f"{found['nbytes'].mean / 1e12:.2f}")
        lines.append("| " + " | ".join((each.case, *cells)) + " |")
    return "\n".join([*lines, ""])


def text(value: Estimate, scale: float = 1.0, places: int = 2) -> str:
    half = f" ± {value.half * scale:.{places}f}" if np.isfinite(value.half) else ""
    return f"{value.mean * scale:.{places}f}{half}"


def verdict(study: Study, over: dict[str, Estimate]) -> str:
    """Say where ours stands: what is certainly better, and what nobody can tell from it."""
    better = [case for case, ratio in over.items() if ratio.high < 1]
    alike = [case for case, ratio in over.items() if ratio.low <= 1 <= ratio.high and case != OURS]
    return f"{study.what}: certainly better than {OURS}: {'; '.join(better) or 'none'}. Not told from it: {'; '.join(alike) or 'none'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the traces")
    parser.add_argument(
        "--requests", type=int, default=1_500, help="of each trace, from its begin; default %(default)s"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="run only traces whose file's name contains this")
    parser.add_argument("--transfers", choices=("fluid", "flow"), default="flow")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--json", action="store_true", help="also write bench/out/policies.json")
    options = parser.parse_args()
    if options.requests < 100 or options.seeds < 1:
        parser.error("--requests: 100 or more; --seeds: 1 or more")
    began = time.process_time()
    tables, reports = [], []
    for study in STUDIES:
        if options.only not in study.file:
            continue
        path = options.traces / study.file
        if not path.exists():
            print(f"left out: {path} is not there")
            continue
        trace = scaled(read(path), study.scale)
        rows, over, told = measure(study, trace, options.requests, options.seeds, options.transfers)
        print(f"{study.what}: {time.process_time() - began:.0f} s of CPU so far", file=sys.stderr)
        tables.append(markdown(told, rows, over, options.seeds))
        print(tables[-1])
        print(verdict(study, over) + "\n")
        reports.append(msgspec.to_builtins({"note": "simulated", "trace": told, "rows": rows, "over": over}))
    print(f"{time.process_time() - began:.0f} s of CPU")
    if options.markdown is not None:
        options.markdown.write_text("\n".join(tables))
    if options.json:
        print(write_json("policies", reports))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
