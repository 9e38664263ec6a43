"""KV that takes another plane rings: by addresses alone, which do not tie a socket to its interface, a wrong route takes it over. Run by `make test-planes`."""

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import METRICS, SMALL, Lab, chat, kv_bytes, lab, metric

HOSTS = {"p0": ("prefill", "10.210.0.11"), "d": ("decode", "10.210.0.13")}
LOOKS = 60


@pytest.fixture
def untied(tmp_path: Path) -> Iterator[Lab]:
    """A gateway and a pair, whose compute plane is named by addresses."""
    with lab(tmp_path) as made:
        (made.folder / "key").write_text(secrets.token_hex(32))
        (made.folder / "key").chmod(0o600)
        made.start("d", "serve", "--config", str(made.rendered("d", "regauge/gateway.toml")))
        for host, (role, address) in HOSTS.items():
            path = made.rendered(host, "regauge/worker.toml")
            text = re.sub(r"nics = \[.*?\]", f'nics = ["{address}"]', path.read_text(), flags=re.DOTALL)
            path.write_text(text.replace('control = "10.210.0.0/16"', f'control = "{address}"'))
            settings = [word for each in SMALL for word in ("--set", each)]
            made.start(host, "worker", "--role", role, "--name", host, "--config", str(path), *settings)
        status, text = made.ask("admin", f"{METRICS}/ready", until='"ready"', limit_s=120)
        assert status == 200, text + "".join(made.log(host) for host in HOSTS)
        yield made


def off_plane(lab_: Lab) -> dict[str, float]:
    return {
        labels.split('worker="')[1].split('"')[0]: n for labels, n in metric(lab_, "regauge_off_plane_bytes").items()
    }


def test_kv_by_a_wrong_route_is_seen_and_no_other(untied: Lab) -> None:
    words = iter(range(1_000))

    def ask() -> None:
        assert chat(untied, f"{next(words)} " * 250)

    for _ in range(12):  # for longer than a window and what it waits for the interfaces' counters
        ask()
    assert off_plane(untied) == {"p0": 0, "d": 0}
    before = kv_bytes(untied)
    assert before > 0
    for node in ("d", "p0"):
        for name in ("all", "biz0", "cmp0"):
            untied.run(node, "sysctl", "-q", "-w", f"net.ipv4.conf.{name}.rp_filter=0")
    table = untied.ip("p0", "rule", "show", "from", "10.210.0.11").rpartition("lookup ")[2].strip()
    untied.ip("p0", "route", "replace", "10.210.0.13/32", "via", "10.211.0.13", "dev", "biz0", "table", table)
    found = off_plane(untied)
    for _ in range(LOOKS):
        if found["p0"] > 0:
            break
        ask()
        found = off_plane(untied)
    assert 0 < found["p0"] <= kv_bytes(untied) - before
