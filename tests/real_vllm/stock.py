"""Shows what vLLM's own connectors do with two unlike caches whose bytes are equally many: they accept the pair and answer with wrong tokens.

    .venv-vllm/bin/python tests/vllm/stock.py

NixlConnector between blocks of 32 and 128 tokens, MooncakeConnector between float16 and bfloat16; each beside a like pair, which it
carries right. Every row is real engines on the CPU, greedy. Exit 0: both are wrong without an error; 1: something else came out.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import START_S, Engine, config, free_port
from regauge.testing.tiny_models import tiny_model

PROMPT = [7 * i % 500 + 3 for i in range(150)]
"""No multiple of a block, and more than one block of either size."""
TOKENS = 12
WRONG = TOKENS // 4
"""Rounding alone leaves the first tokens of an answer as they are; so few that agree are chance."""


@dataclass(frozen=True)
class Side:
    """What tells one side of a pair from the other."""

    dtype: str = "float32"
    block_size: int = 32

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        return {"dtype": self.dtype, "block_size": self.block_size}

    def __str__(self) -> str:
        return f"{self.dtype} x {self.block_size}"


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
class Row:
    """What came out of one pair."""

    connector: str
    prefill: Side
    decode: Side
    alone: tuple[Sequence[int], Sequence[int]]
    """Greedy tokens of the prefill engine and of the decode engine, each for itself."""
    tokens: Sequence[int]
    """Those of prefill and decode together."""
    accepted: bool
    """The request came to an ordinary end, on KV that came from outside."""

    @property
    def agree(self) -> int:
        """Tokens of the answer that either engine alone would have given."""
        return max(sum(a == b for a, b in zip(own, self.tokens, strict=True)) for own in self.alone)

    @property
    def as_said(self) -> bool:
        """A like pair is right, an unlike one is accepted and wrong."""
        return self.accepted and (self.agree == TOKENS if self.prefill == self.decode else self.agree <= WRONG)


def main() -> int:
    """Run both cases and print a table."""
    model = tiny_model("tiny-llama")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            rows += run(case, model, Path(folder))
    for row in rows:
        print(f"\n{row.connector}: prefill {row.prefill}, decode {row.decode}")
        print(f"  prefill alone  {_line(row.alone[0])}")
        print(f"  decode alone   {_line(row.alone[1])}")
        print(f"  prefill->decode{_line(row.tokens)}")
        verdict = "right" if row.agree == TOKENS else f"WRONG: {row.agree} of {TOKENS} tokens agree"
        print(
            f"  {'accepted' if row.accepted else 'not carried'}, {verdict}" + ("" if row.as_said else "  (unexpected)")
        )
    return 0 if rows and all(row.as_said for row in rows) else 1


def _line(tokens: Sequence[int]) -> str:
    return " ".join(f"{token:>4}" for token in tokens)


def run(case: Case, model: Path, folder: Path) -> Iterator[Row]:
    """Start the prefill, then one decode after the other; all have ended when the last row is taken."""
    bootstrap = free_port()
    with _engine(case, "kv_producer", case.prefill, model, folder, bootstrap) as prefill:
        alone = prefill.alone(PROMPT, tokens=TOKENS)
        for number, side in enumerate(case.decodes):
            with _engine(case, "kv_consumer", side, model, folder, bootstrap) as decode:
                own = decode.alone(PROMPT, tokens=TOKENS)
                answer = _carry(case, prefill, decode, bootstrap, f"t{number}")
            accepted = answer["reason"] == "length" and answer["cached"] >= len(PROMPT) - 1
            yield Row(case.connector, case.prefill, side, (alone, own), answer["tokens"], accepted)


def _carry(case: Case, prefill: Engine, decode: Engine, bootstrap: int, transfer: str) -> dict[str, Any]:
    """Ask as the proxies in vLLM's repository do (examples/disaggregated)."""
    asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if case.connector == "MooncakeConnector":
        asked["transfer_id"] = transfer
    returned = prefill.answer(prefill.ask(PROMPT, tokens=1, params=asked))["params"]
    if case.connector == "MooncakeConnector":
        returned = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_engine_id": _engine_id(bootstrap),
            "remote_bootstrap_addr": f"http://127.0.0.1:{bootstrap}",
        }
    return decode.answer(decode.ask(PROMPT, tokens=TOKENS, params=returned))


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
    environment = {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",
    }
    arguments = {**config(model, **side.engine), "kv_transfer_config": transfer}
    engine = Engine(arguments, folder / f"{case.connector}.{role}.log", environment)
    try:
        engine.wait("ready", limit_s=START_S)
        yield engine
    finally:
        engine.end()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
