"""How many spans a long request becomes, and how long planning takes.

    .venv/bin/python bench/plan.py [--json]

`fragments` is what an engine issues that writes each piece of one token (or one page, where the line says so) by itself; `spans` is what crosses here, counted
by the planner, in the way that the cost model chooses for RDMA: `mapped` spans go from page to page, `staged` ones are runs of a chunk
(256 tokens, as many layers as fit into a slot of 4 MiB) between gather and scatter. `mapped` counts the direct spans of every pair that could be mapped.
Page tables are random permutations, except where a line says that pages lie together. Planning is CPU time (one thread), the median of rounds: boxes and
joined pieces of the whole request (mapped), or the boxes of gather and scatter of all its chunks (staged).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness import print_table, write_json
from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.spec import Array, Component, Group, Layout, Model, Placement, Shard, State
from regauge.layout.view import region_sizes
from regauge.plan import Plan, Side, compile, instantiate, pieces
from regauge.plan.boxes import MAX_PIECES
from regauge.plan.cost import DEFAULTS, Decision, Setting, decide
from regauge.plan.sample import roomy
from regauge.plan.wire import REGION, WireFormat

SETTING = Setting("rdma", link_bytes_per_s=50e9)


@dataclass(frozen=True)
class Case:
    """A geometry of one prefill and one decode rank."""

    name: str
    prefill: Layout
    decode: Layout
    tokens: int
    fragments: int
    together: bool = False


def cases() -> Iterator[Case]:
    # sglang#40500: the draft of Kimi Linear, TP1 to TP2 with DCP 2, 170K tokens; 1.71 million descriptors, packed 13.3 thousand. The figures give 10 arrays
    # (5 layers, K and V) and decode pages of 128 tokens (64 x DCP); 8 KV heads of 128 are assumed: they change no count.
    draft = attention_model("kimi-linear draft", 5, Array(8, 128))
    narrow = from_short("bf16,page=128", draft, shard=Shard(0, 2))
    yield Case("sglang#40500: draft KV, TP1 -> TP2, NHD 64 -> 128", from_short("bf16,page=64", draft), narrow,
               171_000, 171_000 * 10)  # fmt: skip
    # sglang#35186: 168 thousand descriptors of 576 bytes, 56K tokens, one of 8 DCP ranks.
    latent = Model("mla", 24, [State("latent", "0-23", {"latent": Array(1, 512), "rope": Array(1, 64)})])
    yield Case("sglang#35186: MLA, DCP 1 -> 8, 576-byte tokens", packed(latent, Shard()),
               packed(latent, Shard(cp_rank=3, cp_size=8)), 56_000, 7_000 * 24)  # fmt: skip
    llama, tokens = load_model("llama-3.1-8b"), 170_000
    for together in (False, True):
        for a, b in (
            ("bf16,page=64", "bf16,page=64"), ("bf16,page=64", "bf16,page=16"), ("bf16,page=24", "bf16,page=16,fused"),
            ("bf16,page=64,hnd", "bf16,page=16,nhd"), ("fp8_e4m3,page=64,hnd", "bf16,page=16,nhd"),
        ):  # fmt: skip
            where = ", pages together" if together else ""
            yield Case(f"llama-3.1-8b: {a} -> {b}{where}", from_short(a, llama), from_short(b, llama), tokens,
                       tokens * llama.num_layers * 2, together)  # fmt: skip


def packed(model: Model, shard: Shard) -> Layout:
    """FP8 latent and rope, one record per token, pages of 64."""
    at = [Placement("layer page token dim", "kv", offset, {"token": 576, "page": 64 * 576}) for offset in (0, 512)]
    parts = [Component(n, "float8_e4m3fn", 1, d, p) for n, d, p in zip(("latent", "rope"), (512, 64), at, strict=True)]
    return Layout(model, [Group("latent", "0-23", 64, parts)], shard)


def side(layout: Layout, tokens: int, rng: np.random.Generator, *, together: bool) -> Side:
    group = layout.groups[0]
    need = -(-tokens // group.page_size)
    pages = np.arange(need) if together else rng.permutation(group.pages)[:need]
    return Side(pages, {name: i << 44 for i, name in enumerate(region_sizes(layout), 1)})


def plan_mapped(plan: Plan, sides: tuple[Side, Side], tokens: int) -> int:
    return len(pieces(instantiate(plan, *sides, (0, tokens))))


def plan_staged(plan: Plan, wire: WireFormat, sides: tuple[Side, Side], tokens: int) -> int:
    """Make the boxes of gather and scatter of every write, as a link does: as many layers of a chunk as fit into a slot."""
    pair, layers = plan.pairs[0], plan.layers_of(plan.pairs[0])
    slot, writes = np.zeros(1, np.int64), 0
    for start in range(0, tokens, SETTING.chunk_tokens):
        chunk = (start, min(start + SETTING.chunk_tokens, tokens))
        count = chunk[1] - chunk[0]
        gather, scatter = wire.halves(pair, count)
        staged = Side(slot, {REGION: 0}, origin=start)
        fit = SETTING.slot_bytes // wire.layer_bytes(pair, count)
        for first in range(0, len(layers), fit):
            some = layers[first : first + fit]
            instantiate(gather, sides[0], staged, chunk, layers=some)
            instantiate(scatter, staged, sides[1], chunk, layers=some)
            writes += 1
    return writes


def mapped_spans(decision: Decision, plan: Plan, sides: tuple[Side, Side], tokens: int) -> str:
    way = next(w for w in decision.ways if w.mode == "mapped")
    if way.refused:
        return "-"
    return str(plan_mapped(plan, sides, tokens)) if way.spans.count < MAX_PIECES else f"~{way.spans.count}"


def measure(case: Case, rounds: int, rng: np.random.Generator) -> dict[str, object]:
    layouts = roomy(case.prefill, case.tokens), roomy(case.decode, case.tokens)
    start = time.process_time()
    plan = compile(*layouts)
    compiling = time.process_time() - start
    a, b = (side(layout, case.tokens, rng, together=case.together) for layout in layouts)
    decision = decide(plan, plan.pairs[0], DEFAULTS, SETTING, (0, case.tokens))
    way, wire, seconds, sent = decision.chosen, WireFormat(plan), [], 0
    for _ in range(rounds):
        start = time.process_time()
        if way.mode == "mapped":
            sent = plan_mapped(plan, (a, b), case.tokens)
        else:
            sent = plan_staged(plan, wire, (a, b), case.tokens)
        seconds.append(time.process_time() - start)
    return {
        "geometry": case.name,
        "path": plan.verdict.path,
        "fragments": case.fragments,
        "mapped": mapped_spans(decision, plan, (a, b), case.tokens),
        "spans": sent,
        "way": way.mode,
        "fewer by": round(case.fragments / sent, 1),
        "plan CPU ms": round(statistics.median(seconds) * 1e3, 1),
        "compile CPU ms": round(compiling * 1e3, 1),
        "wire MiB": way.wire_bytes >> 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="also write bench/out/plan.json")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = [measure(case, options.rounds, rng) for case in cases()]
    print_table(rows)
    if options.json:
        print(write_json("plan", rows))


if __name__ == "__main__":
    main()
