"""TTFT, TPOT and what is left of the transfer when prefill ends, of real deployments on this machine.

    .venv/bin/python bench/serve.py [--rounds N] [--json]

Starts `regauge serve` once per deployment and sends prompts of three lengths, one at a time and in turns. `after` is the time from the last
layer's computation to the commit: what layer-wise transfer does not hide. Medians; the model's arithmetic dominates TTFT and TPOT.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from pydoc_data.topics import topics

from harness import print_table, write_json
from regauge.serve.ports import free_ports

DEPLOYMENTS = {
    "shm  fp8,page=64,hnd -> bf16,page=16,nhd": [],
    "tcp  fp8,page=64,hnd -> bf16,page=16,nhd": ["--transport", "tcp"],
    "tcp  bf16,page=64,hnd -> bf16,page=16,nhd": ["--transport", "tcp", "--prefill-layout", "bf16,page=64,hnd"],
    "shm  bf16,page=16,nhd -> bf16,page=16,nhd": ["--prefill-layout", "bf16,page=16,nhd"],
}
WORDS = (40, 300, 900)
ANSWER = 24


def ask(url: str, words: int) -> tuple[float, float, int]:
    """Return TTFT and TPOT in seconds and the prompt's tokens."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split()[:words])
    body = {"model": "smollm2-135m-instruct", "prompt": text, "max_tokens": ANSWER, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())  # noqa: S310  # our own
    start, first, last, prompt = time.monotonic(), 0.0, 0.0, 0
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if chunk["choices"]:
                    last = time.monotonic()
                    first = first or last
                prompt = (chunk.get("usage") or {}).get("prompt_tokens", prompt)
    return first - start, (last - first) / (ANSWER - 1), prompt


def run(name: str, arguments: list[str], rounds: int) -> list[dict[str, object]]:
    [port] = free_ports("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("wb", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "regauge", "serve", "--port", str(port), "--log-json", *arguments],
            stdout=log, stderr=subprocess.STDOUT)  # fmt: skip
        try:
            wait(url, process)
            ask(url, 40)
            found = {words: [ask(url, words) for _ in range(rounds)] for words in WORDS}
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        lines = Path(log.name).read_text().splitlines()
    done = [json.loads(line) for line in lines if re.match(r'\{.*"prefilled"', line)]
    rows = []
    for values in found.values():
        tokens = values[0][2]
        mine = [d for d in done if d["tokens"] == tokens]
        rows.append(
            {
                "deployment": name,
                "path": mine[0]["path"],
                "mode": mine[0]["mode"],
                "prompt tokens": tokens,
                "wire KiB": mine[0]["wire_bytes"] >> 10,
                "ttft ms": round(statistics.median(v[0] for v in values) * 1e3, 1),
                "tpot ms": round(statistics.median(v[1] for v in values) * 1e3, 1),
                "prefill ms": round(statistics.median(d["prefill_s"] for d in mine) * 1e3, 1),
                "after ms": round(statistics.median(d["after_last_layer_s"] for d in mine) * 1e3, 2),
            }
        )
    return rows


def wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:  # noqa: S310
                if answer.status == 200 and json.load(answer)["status"] == "ready":
                    return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"{url} did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for name, arguments in DEPLOYMENTS.items() for row in run(name, arguments, options.rounds)]
    print_table(rows)
    if options.json:
        write_json("serve", rows)


if __name__ == "__main__":
    main()
