# ruff: noqa: S310  # URLs of our own
"""A real deployment under some load, and a real Prometheus that scrapes it and evaluates the alarms."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment import Served

from regauge.serve.ports import free_ports

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
PATIENCE_S = 60.0
SCRAPE_S = 1


def get(url: str, **query: str) -> bytes:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=20) as answer:
        return bytes(answer.read())


def until(found: Callable[[], Any], what: str) -> Any:
    """Ask again until something is so: neither Prometheus nor the gateway tells when it will be."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            if found_ := found():
                return found_
        except OSError:
            pass  # it is not up yet
        assert time.monotonic() < end, f"{what} did not come within {PATIENCE_S:g} s"
        time.sleep(0.1)


def load(served: Served, requests: int) -> None:
    """Ask so many at once, half of them streamed."""

    def ask(number: int) -> None:
        body = {"model": "smollm2-135m-instruct", "prompt": f"Story {number}: once upon a time " * 8, "max_tokens": 12}
        data = json.dumps({**body, "temperature": 0, "stream": number % 2 == 0}).encode()
        head = {"content-type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{served.url}/v1/completions", data, head), timeout=120
        ) as answer:
            assert b"text" in answer.read()

    with concurrent.futures.ThreadPoolExecutor(requests) as pool:
        list(pool.map(ask, range(requests)))


@dataclass
class Prometheus:
    """A Prometheus on loopback, by its HTTP API."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @classmethod
    def start(cls, program: str, folder: Path, target: str) -> Prometheus:
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "regauge", "static_configs": [{"targets": [target]}]}],
        }
        # JSON is YAML.
        (folder / "prometheus.yml").write_text(json.dumps(config))
        [port] = free_ports("127.0.0.1")
        log = folder / "prometheus.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=out, stderr=out,
            )  # fmt: skip
        found = cls(process, f"http://127.0.0.1:{port}", log)
        until(lambda: found.process.poll() is not None or get(f"{found.url}/-/ready"), "Prometheus")
        assert process.poll() is None, log.read_text()
        return found

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression, now. Fails with Prometheus' own words."""
        try:
            told = json.loads(get(f"{self.url}/api/v1/query", query=expression))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        assert told["status"] == "success", told
        assert not told.get("warnings"), told
        return list(told["data"]["result"])

    def value(self, expression: str) -> float:
        [sample] = self.query(expression)
        return float(sample["value"][1])

    def rules(self) -> list[dict[str, Any]]:
        groups = json.loads(get(f"{self.url}/api/v1/rules"))["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
