"""How many pieces a long request becomes, and how long planning takes.

    .venv/bin/python bench/plan.py [--json]

The request: 170,000 tokens of Llama-3.1-8B geometry (32 layers, 8 KV heads of 128, bf16). One write per token, layer and K or V, as a
naive connector of unlike page sizes makes, would be tokens x layers x 2 pieces. Page tables are random permutations, except
where noted. Planning is a median; joining the boxes into pieces is one run; one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import msgspec
import numpy as np

from harness import print_table, write_json
from regauge.config import TransferConfig
from regauge.layout.presets import from_short, load_model
from regauge.layout.spec import Layout, Region
from regauge.layout.view import region_sizes
from regauge.move.crossing import choose_mode
from regauge.plan import Side, compile, instantiate, pieces
from regauge.plan.wire import WireFormat

TOKENS = 170_000
CHUNK = 256  # tokens of one staged chunk, as `prefill.chunk_tokens`
PAIRS = (
    ("bf16,page=64", "bf16,page=64"),
    ("bf16,page=64", "bf16,page=16"),
    ("bf16,page=24", "bf16,page=16,fused"),
    ("bf16,page=64,hnd", "bf16,page=16,nhd"),
    ("fp8_e4m3,page=64,hnd", "bf16,page=16,nhd"),
)


def side(layout: Layout, rng: np.random.Generator, *, together: bool) -> Side:
    group = layout.groups[0]
    need = -(-TOKENS // group.page_size)
    pages = np.arange(need) if together else rng.permutation(group.pages)[:need]
    return Side(pages, {r.name: r.base for r in layout.regions})


def bound(layout: Layout) -> Layout:
    """Give the regions addresses: planning touches no memory."""
    regions = [Region(name, size, i << 44) for i, (name, size) in enumerate(region_sizes(layout).items(), 1)]
    return msgspec.structs.replace(layout, regions=regions)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model, rng = load_model("llama-3.1-8b"), np.random.default_rng(0)
    rows = []
    for together in (False, True):
        for a, b in PAIRS:
            layouts = [bound(from_short(text, model, pages=TOKENS // 8)) for text in (a, b)]
            plan = compile(*layouts)
            sides = [side(layout, rng, together=together) for layout in layouts]
            seconds, boxes = [], 0
            for _ in range(options.rounds):
                start = time.perf_counter()
                tiles = instantiate(plan, sides[0], sides[1], (0, TOKENS))
                seconds.append(time.perf_counter() - start)
                boxes = sum(len(t.src) for t in tiles)
            # What conversion or short runs keep from being mapped goes through staging: one run per layer and chunk.
            staged = choose_mode(plan, maps_memory=False, piece_bytes=TransferConfig().piece_bytes) == "staged"
            start = time.perf_counter()
            sent = -(-TOKENS // CHUNK) * model.num_layers if staged else len(pieces(tiles))
            joining = 0.0 if staged else time.perf_counter() - start
            naive = TOKENS * model.num_layers * 2
            rows.append(
                {
                    "pair": f"{a} -> {b}",
                    "pages": "together" if together else "scattered",
                    "path": plan.verdict.path,
                    "naive pieces": naive,
                    "pieces sent": sent,
                    "how": "staged" if staged else "mapped",
                    "fewer by": round(naive / sent, 1),
                    "boxes": boxes,
                    "plan ms": round(statistics.median(seconds) * 1e3, 1),
                    "join ms": round(joining * 1e3, 1),
                    "wire MiB": WireFormat(plan).layer_bytes((0, 0), TOKENS) * model.num_layers >> 20,
                }
            )
    print_table(rows)
    if options.json:
        write_json("plan", rows)


if __name__ == "__main__":
    main()
