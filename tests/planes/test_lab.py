"""A whole deployment on three hosts with three planes each, as a bill of materials says: `lab.py`. Run by `make test-planes`, as root."""

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import GATEWAY, METRICS, Lab, chat, crossed, deploy, kv_bytes, lab, metric

MIB = 1 << 20
PROMPTS = [f"{word} " * 250 for word in ("red", "green", "blue")]
REGISTER = Path(__file__).with_name("lab_register.py")
MOONCAKE = 15_001
"""A port as its library has: on every interface."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("lab")) as made:
        deploy(made, "p0", "p1")
        yield made


def test_kv_crosses_the_compute_plane_and_nothing_else_does(served: Lab) -> None:
    kv, sent = crossed(served, PROMPTS)
    assert kv > 4 * MIB
    assert kv <= sent["p0"]["compute"] + sent["p1"]["compute"] < 1.05 * kv
    assert sent["d"]["compute"] < 0.05 * kv
    for planes in sent.values():
        assert planes["business"] < 0.05 * kv
        assert planes["management"] < 0.01 * kv


def carried(served: Lab, plane: str) -> float:
    """Bytes that the prefill hosts have sent on a plane, as the gateway's metrics have them."""
    found = metric(served, "regauge_plane_bytes_total").items()
    own = [n for labels, n in found if re.search(rf'direction="sent",host="p[01]",.*plane="{plane}"', labels)]
    assert len(own) == {"compute": 4, "business": 2}[plane]
    return sum(own)


def test_metrics_tell_what_each_plane_has_carried(served: Lab) -> None:
    kv = kv_bytes(served)
    for _ in range(100):  # the gateway asks workers twice a second
        if (compute := carried(served, "compute")) >= kv:
            break
    assert MIB < kv <= compute < 1.1 * kv
    assert carried(served, "business") < 0.1 * kv
    assert set(metric(served, "regauge_off_plane_bytes").values()) == {0.0}


REFUSED = (0, "ConnectionRefusedError")


@pytest.mark.parametrize(
    ("node", "url", "found"),
    [
        ("client", f"{GATEWAY}/health", 200),
        ("client", f"{GATEWAY}/metrics", 404),
        ("client", f"{GATEWAY}/debug/transfers", 404),
        ("client", "http://10.211.0.13:8001/metrics", REFUSED),
        ("client", "http://10.211.0.13:9000/health", 401),  # a worker's own, which wants a token
        ("client", "http://10.211.0.13:9001/", REFUSED),  # its control port
        ("client", "http://10.210.0.13:9001/", REFUSED),  # likewise, by an address of the other plane
        ("admin", f"{METRICS}/metrics", 200),
        ("admin", f"{METRICS}/debug/transfers", 200),
        ("admin", f"{METRICS}/v1/models", 404),
        ("admin", "http://10.212.0.13:8000/health", REFUSED),
        ("admin", f"{GATEWAY}/health", REFUSED),
        ("stranger", f"{GATEWAY}/health", REFUSED),
        ("stranger", f"{METRICS}/metrics", REFUSED),
        ("stranger", "http://10.210.0.13:9000/health", REFUSED),
        ("stranger", "http://10.211.0.13:9000/health", REFUSED),
        ("d", f"{GATEWAY}/health", 200),  # on the host itself all planes are near
        ("d", f"{METRICS}/metrics", 200),
    ],
)
def test_a_plane_is_answered_on_its_own_interface_alone(
    served: Lab, node: str, url: str, found: int | tuple[int, str]
) -> None:
    """Guests send to addresses of other planes by their own: Linux would take that in."""
    if node != "d":
        router = {"client": "10.211.0.13", "admin": "10.212.0.13", "stranger": "10.210.0.13"}[node]
        served.ip(node, "route", "replace", "default", "via", router)
    answer = served.ask(node, url)
    assert (answer if isinstance(found, tuple) else answer[0]) == found


def test_a_worker_that_registers_with_an_address_of_another_plane_is_left_out(served: Lab) -> None:
    """As one without [planes], that advertises its compute address. What is signed with the key is believed but for that."""
    done = served.run("p1", sys.executable, str(REGISTER), GATEWAY, str(served.folder / "key"), "10.210.0.12")
    assert done.stdout == "200\n", done.stderr
    _, text = served.ask("admin", f"{METRICS}/ready")
    assert "astray" not in text
    line = "the worker is left out .*error='its url 10.210.0.12 is on planes.compute, and belongs on planes.business"
    assert re.search(line, served.log("d")), served.log("d")


def test_an_operator_looks_on_by_the_management_plane(served: Lab) -> None:
    done = served.regauge("admin", "top", "--url", METRICS, "--once", "--json")
    assert done.returncode == 0, done.stderr
    assert {each["name"] for each in json.loads(done.stdout)["workers"]} == {"p0", "p1", "d"}


def test_firewalls_keep_library_ports_to_the_compute_plane(served: Lab) -> None:
    """Mooncake listens on every interface; the rendered rules stand before it, and all goes on."""
    library = [*served.inside("p0", "python3", "-m", "http.server", str(MOONCAKE), "--bind", "0.0.0.0")]  # noqa: S104
    served.spawn(*library)
    for node, address in (("client", "10.211.0.11"), ("stranger", "10.210.0.11"), ("admin", "10.212.0.11")):
        assert served.ask(node, f"http://{address}:{MOONCAKE}/nothing", until="Nothing matches", limit_s=10)[0] == 404
    for host in ("p0", "p1", "d"):
        done = served.run(host, "nft", "-f", str(served.rendered(host, "nftables/regauge.nft")))
        assert done.returncode == 0, done.stderr
    try:
        assert served.ask("stranger", f"http://10.210.0.11:{MOONCAKE}/nothing")[0] == 404
        for node, address in (("client", "10.211.0.11"), ("admin", "10.212.0.11"), ("client", "10.210.0.11")):
            assert served.ask(node, f"http://{address}:{MOONCAKE}/nothing", limit_s=1)[0] == 0
        assert served.ask("client", "http://10.211.0.13:9000/health", limit_s=1)[0] == 0
        assert chat(served, PROMPTS[0].replace("red", "grey"))
        assert [served.doctor(host) for host in ("p0", "p1", "d")] == [[], [], []]
    finally:
        for host in ("p0", "p1", "d"):
            served.run(host, "nft", "delete", "table", "inet", "regauge")


def test_files_are_read_anew_while_all_runs(served: Lab) -> None:
    """What the planes have filled in is no change."""
    gateway = served.processes[0]
    before = served.log("d").count("the configuration was read anew")
    gateway.send_signal(signal.SIGHUP)
    text = served.log("d")
    for _ in range(100):
        if (text := served.log("d")).count("the configuration was read anew") == before + 2:  # two processes
            break
        served.ask("client", f"{GATEWAY}/health")
    else:
        pytest.fail(text)
    assert "a restart is needed" not in text
    assert "was not read anew" not in text


def test_a_host_that_stops_leaves_and_the_others_go_on(served: Lab) -> None:
    [p1] = [process for process in served.processes if served.namespace("p1") in process.args]  # type: ignore[operator]
    p1.terminate()
    assert p1.wait(30) == 0
    _, text = served.ask("admin", f"{METRICS}/ready")
    for _ in range(100):  # both gateway processes look at who is there, twice a second
        if '"p1"' not in text:
            break
        _, text = served.ask("admin", f"{METRICS}/ready")
    assert {each["name"] for each in json.loads(text)["workers"]} == {"p0", "d"}
    assert chat(served, PROMPTS[0].replace("red", "white"))
