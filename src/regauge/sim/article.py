"""The published deployment of 12 prefill servers and one decode server, reproduced, sized and questioned in one report.

What is claimed: servers, one switch of 128 ports of 400G, three prefill rates of a server, and a revenue. Not said: the model, the
decode server, the cached share, the price. The report says which of them fit the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from regauge.sim import plan_charts
from regauge.sim.article_plan import Planned, questions
from regauge.sim.claims import Candidate, Claim, Findings, context_of, hit_at, question
from regauge.sim.costs import Bought
from regauge.sim.devices import Catalogue, shipped
from regauge.sim.model import Point, fit_efficiency
from regauge.sim.money import HITS, Money, at_rate
from regauge.sim.revenue import Listed, Mix, hit_for, listed, needed, revenue, uncached_for
from regauge.sim.work import model_work

POINTS = (Point(65_536, 95_920.5), Point(300_000, 58_412.0))
RATE = Decimal("95920.5")
"""Tokens per second of one prefill server at 64K."""
MIXED = 83_670.0
"""Tokens per second of one prefill server in agent mix, about."""
STATED = Decimal(646_000)
"""Revenue of a month, CNY, about."""
HIT = Decimal("0.9")
MODELS = (
    "glm-5.2", "glm-5", "deepseek-v3.2", "deepseek-v3", "glm-4.5", "glm-4.5-air", "minimax-m2", "qwen3.5-397b-a17b",
)  # fmt: skip
LIKELIEST = "glm-5.2"
DECODE = "h200"
OTHERS = ("b200", "mi300x", "h100", "h20", "mtt-s5000")
EFFICIENCIES = (0.10, 0.12, 0.20, 0.30, 0.40, 0.50)
CLAIM = Claim("the published prefill rates", "mtt-s5000", 12, DECODE, 1, "128x400g", POINTS)
PICTURES = (
    ("article-efficiency.svg", "Part of the peak rate that each candidate model asks for"),
    ("article-revenue.svg", "Revenue over price and hit share"),
)


@dataclass(frozen=True, slots=True)
class HitFor:
    """What an efficiency implies."""

    efficiency: float
    hit: float | None
    """None: it is enough without hits."""
    revenue: Decimal | None
    """Of a month at that share and the list price."""


@dataclass(frozen=True, slots=True)
class Article:
    """Everything that the report says."""

    catalogue: Catalogue
    findings: Findings
    decodes: tuple[Findings, ...]
    """The likeliest model with other decode devices."""
    price: Listed
    money: Money
    """Of the whole deployment, its prefill servers at the rate of 64K."""
    implied: tuple[HitFor, ...]
    air: float
    """Fitted efficiency at 90 % cached of cards cooled by air."""
    context: float
    """Tokens of a prompt that the mixed rate amounts to."""
    planned: tuple[Planned, ...]
    """What the planner says of these servers."""

    @property
    def likeliest(self) -> Candidate:
        """The model that fits best."""
        return next(c for c in self.findings.candidates if c.key == LIKELIEST)


def article(catalogue: Catalogue | None = None, *, decode: str = DECODE, models: Sequence[str] = MODELS) -> Article:
    """Return the article's deployment, questioned. Raises ConfigError for an unknown decode device or model."""
    known = shipped() if catalogue is None else catalogue
    claim, price = replace(CLAIM, decode=decode), listed()["glm-5.3"]
    found = question(claim, known, list(dict.fromkeys((LIKELIEST, *models))))
    others = [replace(claim, decode=d) for d in OTHERS if d != decode]
    size = known.models[LIKELIEST].active_b
    work = model_work(LIKELIEST, size.value * 1e9 if size else 0.0)
    implied = []
    for efficiency in EFFICIENCIES:
        hit = hit_at(work, POINTS, found.peak.value, efficiency)
        earned = None if hit is None else revenue(RATE, price, Mix(Decimal(f"{hit:.3f}")))
        implied.append(HitFor(efficiency, hit, earned))
    cached = [Point(p.tokens, p.tokens_per_s, float(HIT)) for p in POINTS]
    money = at_rate(
        RATE * claim.prefill_servers, price, Mix(HIT),
        [Bought("prefill", claim.prefill, claim.prefill_servers), Bought("decode", decode, claim.decode_servers)],
        switch=claim.switch, switches=1, catalogue=known,
    )  # fmt: skip
    return Article(
        known, found, tuple(question(c, known, [LIKELIEST]) for c in others), price, money, tuple(implied),
        fit_efficiency(work, cached, found.peak.low).fitted.value, context_of(MIXED, POINTS),
        questions(claim, known, LIKELIEST, float(HIT)),
    )  # fmt: skip


def server_revenue(found: Article) -> Decimal:
    """Return the revenue of one prefill server for a month, which is the published figure."""
    return revenue(RATE, found.price, Mix(HIT))


def iso_line(price: Listed) -> list[tuple[str, Decimal, Decimal, Decimal | None]]:
    """Return, for each published rate: its name, CNY per million that the stated revenue needs, and the hit share at the list price."""
    rates = (("64K", RATE), ("agent mix", Decimal(str(MIXED))), ("300K", Decimal(str(POINTS[1].tokens_per_s))))
    return [(name, rate, needed(STATED, rate), hit_for(needed(STATED, rate), price)) for name, rate in rates]


def pairs(price: Listed) -> list[tuple[Decimal, Decimal]]:
    """Return (hit share, uncached price) pairs that give the stated revenue at 64K, cached tokens costing the list price's part."""
    ratio = price.cached_input / price.uncached_input
    return [(hit, uncached_for(needed(STATED, RATE), hit, ratio)) for hit in HITS]


def draw(found: Article, folder: Path) -> list[Path]:
    """Write the report's pictures into a folder and return their paths. Raises ConfigError without matplotlib."""
    efficiency, surface = (folder / name for name, _ in PICTURES)
    plan_charts.efficiencies(efficiency, found.findings)
    price = found.price
    own = plan_charts.Marked(
        f"published: {HIT:.0%} cached at {price.uncached_input:g} / {price.cached_input:g} CNY, {server_revenue(found):,.0f}",
        float(HIT), float(price.uncached_input),
    )  # fmt: skip
    others = {p.name: float(p.uncached_input) for p in listed().values() if p.currency == "CNY" and _alike(p, price)}
    plan_charts.revenue_surface(
        surface, RATE, ratio=float(price.cached_input / price.uncached_input), stated=float(STATED), currency="CNY",
        marked=[own], prices=others,
    )  # fmt: skip
    return [efficiency, surface]


def _alike(one: Listed, other: Listed) -> bool:
    return one.cached_input * other.uncached_input == other.cached_input * one.uncached_input
