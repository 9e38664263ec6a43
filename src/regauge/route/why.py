"""Why a request went where it went: every decision for it, and what became of it; kept for the newest requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from regauge.route.cluster import Candidate, Refusal, Request, Route

MOST_EVENTS: Final = 64
"""Of one request; what comes after is not kept."""
TIMES: Final = ("queue_s", "compute_s", "transfer_s", "wait_s")
WORDS: Final = {
    "queue_s": "waiting at prefill",
    "compute_s": "computing",
    "transfer_s": "transfer not hidden",
    "wait_s": "waiting for decode",
}


What = str | tuple[str, *tuple[object, ...]]
"""What happened: in words, or as a format and its figures, which few will ever read and are not written before."""


@dataclass(slots=True, eq=False)
class Record:
    """One client request: its decisions and events, with times in seconds since the first decision."""

    id: str
    tenant: str
    tokens: int
    began: float
    decisions: list[tuple[float, str, Route | Refusal]] = field(default_factory=list)
    events: list[tuple[float, str, What]] = field(default_factory=list)

    def happened(self, attempt: str, now: float, what: What) -> None:
        """Keep what became of an attempt."""
        if len(self.events) < MOST_EVENTS:
            self.events.append((now - self.began, attempt, what))

    def text(self) -> str:
        """Return the explanation for a person to read."""
        lines = [f"request {self.id}: {self.tokens} tokens" + (f", tenant {self.tenant}" if self.tenant else "")]
        for at, attempt, decision in self.decisions:
            lines.append(f"{at:9.3f} s  {attempt}")
            lines += (f"             {line}" for line in explain(decision))
            lines += (
                f"{when:9.3f} s  {attempt}: {_said(what)}" for when, whose, what in self.events if whose == attempt
            )
        return "\n".join(lines)

    def data(self) -> dict[str, object]:
        """Return the same as plain data for JSON."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "tokens": self.tokens,
            "decisions": [{"at_s": at, "attempt": attempt, **_data(what)} for at, attempt, what in self.decisions],
            "events": [{"at_s": at, "attempt": attempt, "event": _said(what)} for at, attempt, what in self.events],
        }


def explain(decision: Route | Refusal) -> list[str]:
    """Return a decision in lines: what was chosen and every term of it; the others, and by what they lost."""
    if isinstance(decision, Refusal):
        return [f"refused, {decision.reason}: {decision.message}"]
    lines = [
        f"{_pair(decision.prefill, decision.decode)}, by {decision.policy}: first token after {decision.ttft_s:.3f} s"
    ]
    lines.append("  " + _terms(decision.terms))
    if decision.note:
        lines.append(f"  note: {decision.note}")
    lines += (
        f"  not {_pair(other.prefill, other.decode)}: {_lost(decision, other)}" for other in decision.candidates[1:]
    )
    return lines


def _said(what: What) -> str:
    return what if isinstance(what, str) else what[0].format(*what[1:])


def _pair(prefill: str | None, decode: str) -> str:
    return f"{prefill} > {decode}" if prefill else f"{decode} alone"


def _terms(terms: Mapping[str, float]) -> str:
    parts = [f"{WORDS[name]} {terms[name]:.3f} s" for name in TIMES if name in terms]
    if "cached_tokens" in terms:
        parts.append(f"{terms['cached_tokens']:.0f} tokens cached")
    if terms.get("wire_bytes"):
        parts.append(f"{terms['wire_bytes'] / 1e6:.1f} MB to send")
    if "tpot_s" in terms:
        parts.append(f"{terms['tpot_s'] * 1e3:.1f} ms per token")
    return ", ".join(parts)


def _lost(chosen: Route, other: Candidate) -> str:
    """Say by which term a candidate differs most from the chosen one."""
    theirs, ours = other.terms, chosen.terms
    deltas = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in TIMES}
    worst = max(deltas, key=lambda name: deltas[name])
    total = sum(deltas.values())
    if deltas[worst] <= 0:
        return f"{total:+.3f} s; ordered behind by the policy"
    return f"{total:+.3f} s, most of it {WORDS[worst]} ({deltas[worst]:+.3f} s); {_terms(theirs)}"


def _data(decision: Route | Refusal) -> dict[str, object]:
    if isinstance(decision, Refusal):
        return {
            "refused": decision.reason,
            "message": decision.message,
            "retry_after_s": decision.retry_after_s,
            "ttft_s": decision.ttft_s,
        }
    return {
        "policy": decision.policy,
        "prefill": decision.prefill,
        "decode": decision.decode,
        "ttft_s": decision.ttft_s,
        "terms": dict(decision.terms),
        "note": decision.note,
        "others": [
            {
                "prefill": other.prefill,
                "decode": other.decode,
                "terms": dict(other.terms),
                "why_not": _lost(decision, other),
            }
            for other in decision.candidates[1:]
        ],
    }


class Journal:
    """The newest requests' records: at most `most`, the oldest go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._records: dict[str, Record] = {}
        self._order: deque[str] = deque()
        self._roots: dict[str, str] = {}
        """Of attempts that are not named as their request."""

    def __len__(self) -> int:
        return len(self._records)

    def decided(self, request: Request, decision: Route | Refusal, now: float) -> Record:
        """Keep a decision; return where."""
        root = request.root or request.id
        record = self._records.get(root)
        if record is None:
            record = self._records[root] = Record(root, request.tenant, request.tokens, now)
            self._order.append(root)
            if len(self._order) > self._most:
                gone = self._records.pop(self._order.popleft())
                for _, attempt, _ in gone.decisions:
                    if attempt != gone.id:
                        self._roots.pop(attempt, None)
        if len(record.decisions) < MOST_EVENTS:
            record.decisions.append((now - record.began, request.id, decision))
            if root != request.id:
                self._roots[request.id] = root
        return record

    def happened(self, attempt: str, now: float, what: What) -> None:
        """Keep what became of an attempt."""
        record = self.of(attempt)
        if record is not None:
            record.happened(attempt, now, what)

    def of(self, name: str) -> Record | None:
        """Return the record of a request, by its id or that of an attempt; None: not kept."""
        return self._records.get(self._roots.get(name, name))
