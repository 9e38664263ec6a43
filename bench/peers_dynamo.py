"""ai-dynamo 1.4.2's replay simulator on a Mooncake trace: how fast it is, and what it says of transfers into one decode worker.

    scripts/install-dynamo
    python bench/peers_dynamo.py --trace mooncake_conversation.jsonl [--prefills 12] [--decodes 4] [--rounds N] [--json]

It runs in an environment and a process of its own. CPU seconds are those of `run_trace_replay`: it reads the file, simulates, and sums up; import and the start of
Python are apart. Its log is off. Blocks are the trace's (512 tokens), engines its default model of one, caches 16,384 blocks, KV 131,072 bytes a token.
Where each request is asked for, it writes a line for each, which costs CPU: the speeds are of runs without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import print_table, write_json

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-dynamo" / "bin" / "python"
BLOCK = 512
KV_BYTES = 131_072
ENGINE: Mapping[str, object] = {
    "block_size": BLOCK,
    "num_gpu_blocks": 16_384,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8_192,
    "kv_bytes_per_token": KV_BYTES,
}


@dataclass(frozen=True)
class Request:
    """One request of theirs; seconds."""

    arrived: float
    first: float
    ended: float
    prefill: int
    decode: int
    cached: int
    transfer: float
    """From the decode worker's reservation to its activation: what their simulator lets pass for the KV's way."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.arrived


@dataclass(frozen=True)
class Replay:
    """What a run took, and what it says."""

    requests: int
    cpu_s: float
    """Of the simulation: their one call."""
    import_cpu_s: float
    wall_s: float
    memory: int
    """Bytes, the most that the process had."""
    report: Mapping[str, float]
    """Their summary: mean_ttft_ms, p99_ttft_ms, prefix_cache_reused_ratio, ..."""
    each: tuple[Request, ...] = ()
    """If asked for, in the order of their file."""

    @property
    def per_cpu_s(self) -> float:
        """Simulated requests per CPU second."""
        return self.requests / self.cpu_s


class Missing(Exception):
    """The peer is not installed."""


class Failed(Exception):
    """The peer failed: says what it wrote."""


def replay(
    trace: Path,
    prefills: int,
    decodes: int,
    *,
    router: str = "kv_router",
    gb_per_s: float = 50.0,
    speed: float = 1.0,
    each: bool = False,
    engine: Mapping[str, object] | None = None,
) -> Replay:
    """Replay a Mooncake trace. `router`: kv_router or round_robin; `gb_per_s`: of a transfer; `speed`: arrivals so many times as fast.

    Raises Missing without its environment, Failed where it ends with an error.
    """
    if not PYTHON.exists():
        raise Missing("ai-dynamo is not installed: run scripts/install-dynamo")
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "each.jsonl"
        asked = {
            "trace": str(trace.resolve()),
            "engine": {**ENGINE, "kv_transfer_bandwidth": gb_per_s, **(engine or {})},
            "replay": {
                "num_prefill_workers": prefills,
                "num_decode_workers": decodes,
                "trace_block_size": BLOCK,
                "router_mode": router,
                "arrival_speedup_ratio": speed,
                "report_jsonl_path": str(lines) if each else None,
            },
        }
        child = Path(__file__).with_name("peers_dynamo_run.py")
        done = subprocess.run(
            [str(PYTHON), str(child), json.dumps(asked)],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise Failed(f"ai-dynamo's replay ended with {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        rows = [json.loads(line) for line in lines.read_text().splitlines()] if each else []
    report = found["report"]
    return Replay(
        int(report["completed_requests"]),
        found["cpu_s"],
        found["import_cpu_s"],
        found["wall_s"],
        found["memory"],
        report,
        tuple(_request(row) for row in rows),
    )


def _request(row: Mapping[str, float]) -> Request:
    return Request(
        row["arrival_time_ms"] / 1e3,
        row["first_token_ms"] / 1e3,
        row["terminal_time_ms"] / 1e3,
        int(row["prefill_worker_idx"]),
        int(row["decode_worker_idx"]),
        int(row["reused_input_tokens"]),
        (row["destination_activated_ms"] - row["destination_reserved_ms"]) / 1e3,
    )


def incast(senders: int, *, tokens: int = 65_536, gb_per_s: float = 1.0) -> Replay:
    """Let so many prefill workers send a prompt's KV to one decode worker at once, each with a transfer of its own."""
    blocks = tokens // BLOCK
    engine = {"max_num_batched_tokens": tokens}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "burst.jsonl"
        lines = (
            {
                "timestamp": 0,
                "input_length": tokens,
                "output_length": 2,
                "hash_ids": list(range(i * blocks, (i + 1) * blocks)),
            }
            for i in range(senders)
        )
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return replay(trace, senders, 1, router="round_robin", gb_per_s=gb_per_s, each=True, engine=engine)


def row(name: str, runs: Sequence[Replay]) -> dict[str, object]:
    one = runs[0]
    return {
        "router": name,
        "requests": one.requests,
        "CPU s": statistics.median(run.cpu_s for run in runs),
        "requests/CPU s": round(statistics.median(run.per_cpu_s for run in runs)),
        "import CPU s": statistics.median(run.import_cpu_s for run in runs),
        "MiB": one.memory >> 20,
        "TTFT ms": one.report["mean_ttft_ms"],
        "P99": one.report["p99_ttft_ms"],
        "hit": one.report["prefix_cache_reused_ratio"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="a Mooncake trace")
    parser.add_argument("--prefills", type=int, default=12)
    parser.add_argument("--decodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="also write bench/out/peers_dynamo.json")
    options = parser.parse_args()
    try:
        runs: dict[str, list[Replay]] = {"kv_router": [], "round_robin": []}
        for _ in range(options.rounds):
            for name, found in runs.items():
                found.append(replay(options.trace, options.prefills, options.decodes, router=name))
        bursts = {senders: incast(senders) for senders in (1, 12)}
    except Missing as error:
        parser.error(str(error))
    rows = [row(name, found) for name, found in runs.items()]
    print(f"ai-dynamo 1.4.2, {options.prefills} prefill and {options.decodes} decode workers; simulated by it")
    print_table(rows)
    size = 65_536 * KV_BYTES
    print(
        f"\n{size / 1e9:.2f} GB to one decode worker at 1 GB/s; each alone would take {size / 1e9:.2f} s; simulated by it"
    )
    cases: list[dict[str, object]] = [
        {
            "at once": senders,
            "first landed after s": min(each.transfer for each in run.each),
            "last landed after s": max(each.transfer for each in run.each),
            "a shared port takes s": senders * size / 1e9,
        }
        for senders, run in bursts.items()
    ]
    print_table(cases)
    if options.json:
        print(write_json("peers_dynamo", {"replay": rows, "incast": cases}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
