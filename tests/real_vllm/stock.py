"""Shows what vLLM's own connectors do with two unlike caches whose bytes are equally many: they accept the pair and answer with wrong tokens.

    .venv-vllm/bin/python tests/real_vllm/stock.py

NixlConnector between blocks of 32 and 128 tokens, MooncakeConnector between float16 and bfloat16; each beside a like pair, which it
carries right. Every row is real engines on the CPU, greedy, and as control what each engine answers alone. Exit 0: both are accepted and
wrong, without an error; 1: something else came out.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import START_S, Engine, config, free_port, nixl_environment
from regauge.testing.tiny_models import tiny_model

PROMPTS = [random.Random(n).choices(range(3, 500), k=33 + 15 * n) for n in range(12)]
"""None fills its last block, of either size."""
TOKENS = 12
SHOWN = 3
"""Prompts whose tokens are printed."""


@dataclass(frozen=True)
class Side:
    """What tells one side of a pair from the other."""

    dtype: str = "float32"
    block_size: int = 32

    def __str__(self) -> str:
        return f"{self.dtype} in blocks of {self.block_size}"


@dataclass(frozen=True)
class Case:
    """One prefill and the decodes that are tried with it: first a like one, then the one that is silently wrong."""

    connector: str
    prefill: Side
    decodes: tuple[Side, Side]


CASES = (
    Case("NixlConnector", Side(), (Side(), Side(block_size=128))),
    Case("MooncakeConnector", Side("float16"), (Side("float16"), Side("bfloat16"))),
)


@dataclass(frozen=True)
class Answers:
    """Greedy tokens for one prompt: of either engine alone, and of both together."""

    prefill: Sequence[int]
    decode: Sequence[int]
    together: Sequence[int]
    accepted: bool
    """The request came to an ordinary end, on KV that came from outside."""

    @property
    def control(self) -> int:
        """First tokens on which the engines agree: rounding has not changed the text yet."""
        return _common(self.prefill, self.decode)

    @property
    def agree(self) -> int:
        """Of these, how many the two together begin with."""
        return _common(self.together, self.decode[: self.control])


@dataclass(frozen=True)
class Row:
    """What came out of one pair."""

    case: Case
    decode: Side
    answers: Sequence[Answers]

    @property
    def control(self) -> int:
        """Tokens that a right hand-over gives."""
        return sum(a.control for a in self.answers)

    @property
    def agree(self) -> int:
        """Tokens that this one gave."""
        return sum(a.agree for a in self.answers)

    @property
    def as_said(self) -> bool:
        """A like pair is right; an unlike one is accepted, and hardly anything of what both engines say is left."""
        like = self.case.prefill == self.decode
        right = self.agree == self.control == TOKENS * len(self.answers)
        wrong = self.control >= TOKENS and self.agree * 4 <= self.control
        return all(a.accepted for a in self.answers) and (right if like else wrong)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main() -> int:
    """Run both cases and print a table."""
    model = tiny_model("tiny-llama")
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for case in CASES for row in run(case, model, Path(folder))]
    for row in rows:
        print(f"\n{row.case.connector}: prefill {row.case.prefill}, decode {row.decode}")
        for answers in row.answers[:SHOWN]:
            print(f"  prefill alone       {_line(answers.prefill)}")
            print(f"  decode alone        {_line(answers.decode)}")
            print(f"  prefill and decode  {_line(answers.together)}\n")
        accepted = sum(a.accepted for a in row.answers)
        print(
            f"  {accepted} of {len(row.answers)} requests accepted; of {row.control} tokens that both engines give alone, "
            f"{row.agree} came out{'' if row.as_said else '  (UNEXPECTED)'}"
        )
    return 0 if all(row.as_said for row in rows) else 1


def _line(tokens: Sequence[int]) -> str:
    return " ".join(f"{token:>3}" for token in tokens)


def run(case: Case, model: Path, folder: Path) -> Iterator[Row]:
    """Start the prefill, then one decode after the other; all have ended when the last row is taken."""
    bootstrap = free_port()
    with _engine(case, "kv_producer", case.prefill, model, folder, bootstrap) as prefill:
        first = [prefill.alone(ids, tokens=TOKENS) for ids in PROMPTS]
        for number, side in enumerate(case.decodes):
            with _engine(case, "kv_consumer", side, model, folder, bootstrap) as decode:
                second = [decode.alone(ids, tokens=TOKENS) for ids in PROMPTS]
                answers = []
                for index, ids in enumerate(PROMPTS):
                    answer = _carry(case, prefill, decode, bootstrap, f"t{number}.{index}", ids)
                    accepted = answer["reason"] == "length" and answer["cached"] >= len(ids) - 1
                    answers.append(Answers(first[index], second[index], answer["tokens"], accepted))
            yield Row(case, side, answers)


def _carry(
    case: Case, prefill: Engine, decode: Engine, bootstrap: int, transfer: str, ids: list[int]
) -> dict[str, Any]:
    """Ask prefill, then decode, in the words of the connector's proxy."""
    asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if case.connector == "MooncakeConnector":
        asked["transfer_id"] = transfer
    returned = prefill.answer(prefill.ask(ids, tokens=1, params=asked))["params"]
    if case.connector == "MooncakeConnector":
        returned = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_engine_id": _engine_id(bootstrap),
            "remote_bootstrap_addr": f"http://127.0.0.1:{bootstrap}",
        }
    returned.pop("remote_prefill_cached_tokens", None)  # would be told as decode's own count of cached tokens
    return decode.answer(decode.ask(ids, tokens=TOKENS, params=returned))


def _engine_id(bootstrap: int) -> str:
    """Ask Mooncake's bootstrap server for the prefill engine's name."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", bootstrap, timeout=10)) as connection:
        connection.request("GET", "/query")
        ranks: dict[str, dict[str, str]] = json.load(connection.getresponse())
    return next(iter(ranks.values()))["engine_id"]


@contextlib.contextmanager
def _engine(case: Case, role: str, side: Side, model: Path, folder: Path, bootstrap: int) -> Iterator[Engine]:
    transfer: dict[str, Any] = {"kv_connector": case.connector, "kv_role": role}
    if case.connector == "MooncakeConnector":
        transfer["kv_connector_module_path"] = "mooncake_on_cpu"
        transfer["kv_connector_extra_config"] = {"mooncake_protocol": "tcp", "num_workers": 2}
    else:
        transfer["kv_buffer_device"] = "cpu"
    environment = {**nixl_environment(), "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap)}
    given = config(model, dtype=side.dtype, block_size=side.block_size, kv_transfer_config=transfer)
    engine = Engine(given, folder / f"{case.connector}.{role}.log", environment)
    try:
        engine.wait("ready", limit_s=START_S)
        yield engine
    finally:
        engine.end()


if __name__ == "__main__":
    sys.exit(main())
