"""The published figures of arXiv 2604.15039v2 beside what `regauge.sim.prfaas` computes from the published profile.

Everything here is a model. The H20's prefill times are not published: they are a line through two rows of the paper's own table (96 H20
and the case study), so that those two are checks of consistency; the rest are predictions. So is the decode rate of an instance.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from harness import print_table, write_json
from regauge.sim.curves import Polynomial, fit
from regauge.sim.prfaas import Averaging, Deployment, Lengths, kv_rate, rates
from regauge.sim.prfaas import best as search

MIB = float(1 << 20)
PROFILE = (
    (1_000, 190.8, 0.44, 3.61),
    (8_000, 308.9, 0.72, 3.59),
    (32_000, 701.3, 1.84, 3.19),
    (128_000, 2316.3, 7.40, 2.62),
)
"""Table of the internal 1T hybrid on 8 H200: tokens, KV in MiB, prefill seconds, published Phi in Gbit/s."""
H200 = fit([(tokens, seconds) for tokens, _, seconds, _ in PROFILE])
KV = fit([(tokens, mib * MIB) for tokens, mib, _, _ in PROFILE], degree=1)
H20 = Polynomial(0.372, 1.426e-4)
"""Through 9 / 2.11 s at 27.4K and 3 / 1.64 s at 10.2K tokens."""
DECODE_RATE = 3.91 / 5
LENGTHS = Lengths(9.90, 1.00, 128, 128_000)
CASE = Deployment(LENGTHS, 4, 3, 5, H200.curve, H20, KV.curve, DECODE_RATE, 100e9 / 8, 19_400)
ALIKE = replace(CASE, remote=0, local=9, decode=3)
NAIVE = replace(CASE, local=0, decode=8)


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure and ours."""

    what: str
    published: float
    ours: float
    within: float
    """Largest part by which they may differ."""

    @property
    def off(self) -> float:
        """Ours over the published, minus 1."""
        return self.ours / self.published - 1.0


def figures(averaging: Averaging) -> list[Figure]:
    """Return every published figure that the model gives."""
    case, alike, naive = (rates(replace(d, averaging=averaging)) for d in (CASE, ALIKE, NAIVE))
    found = [
        Figure("case 4/3/5, t = 19.4K: Theta_prfaas", 1.61, case.remote, 0.03),
        Figure("case: Theta_pdp", 1.64, case.local, 0.03),
        Figure("case: Theta_pdd", 3.91, case.decode, 0.03),
        Figure("case: Lambda", 3.24, case.served, 0.03),
        Figure("case: share p", 0.496, case.share, 0.03),
        Figure("case: egress, Gbit/s", 13.0, case.egress * 8e-9, 0.07),
        Figure("96 H20, 9P 3D: Theta_pdp", 2.11, alike.local, 0.03),
        Figure("96 H20: Theta_pdd", 2.35, alike.decode, 0.03),
        Figure("96 H20: Lambda", 2.11, alike.served, 0.03),
        Figure("naive mix 4P, 8D: Theta_prfaas", 2.45, naive.remote, 0.03),
        Figure("naive mix: Theta_pdd", 6.25, naive.decode, 0.03),
        Figure("naive mix: Lambda", 2.45, naive.served, 0.03),
        Figure("case over 96 H20", 1.54, case.served / alike.served, 0.03),
        Figure("naive mix over 96 H20", 1.16, naive.served / alike.served, 0.03),
    ]
    return found + [
        Figure(f"Phi({tokens // 1000}K), Gbit/s", phi, kv_rate(s, mib * MIB) * 8e-9, 0.03)
        for tokens, mib, s, phi in PROFILE
    ]


def optimum(averaging: Averaging) -> list[Figure]:
    """Return what the grid search finds beside the paper's choice."""
    chosen, found = search(replace(CASE, averaging=averaging))
    return [
        Figure("optimum: threshold, tokens", 19_400, chosen.threshold, 0.05),
        Figure("optimum: local prefill instances", 3, chosen.local, 0.0),
        Figure("optimum: Lambda", 3.24, found.served, 0.03),
    ]


def main() -> None:
    """Print all figures for both ways of averaging; fails if those of mean lengths are off by more than their limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="also write bench/out/published.json")
    options = parser.parse_args()
    print(f"T(l) on 8 H200: {H200.curve}; residuals {', '.join(f'{r:+.1%}' for r in H200.residuals)}")
    print(f"S(l): {KV.curve}; residuals {', '.join(f'{r:+.1%}' for r in KV.residuals)}")
    every: dict[str, list[Figure]] = {}
    ways: tuple[Averaging, ...] = ("mean-length", "mean-time")
    for way in ways:
        every[way] = figures(way) + optimum(way)
        print(
            f"\naveraging: {way}, {'T(E[l]): the one that is held to the limits' if way == 'mean-length' else 'E[T(l)]'}"
        )
        print_table(
            [{"figure": f.what, "published": f.published, "ours": f.ours, "off %": f.off * 100, "limit %": f.within * 100}
             for f in every[way]]
        )  # fmt: skip
    if options.json:
        write_json("published", {w: [(f.what, f.published, f.ours) for f in every[w]] for w in ways})
    missed = [f.what for f in every["mean-length"] if abs(f.off) > f.within]
    if missed:
        raise SystemExit(f"over the limit: {', '.join(missed)}")


if __name__ == "__main__":
    main()
