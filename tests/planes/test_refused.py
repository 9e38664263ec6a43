"""A host whose network is not what its planes need: regauge says what and why before it starts, and its command mends it. As root: `lab.py`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, lab

CHECK = "import sys; from pathlib import Path; from regauge import cli, config, planes; planes.enforced(config.load(Path(sys.argv[1])))"
DECODE = '\n[[workers]]\nname = "d"\nrole = "decode"\nurl = "http://10.211.0.13:9000"\ncontrol = "10.210.0.13:9001"\n'


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        config = made.rendered("p0", "regauge/worker.toml")
        config.write_text(config.read_text() + DECODE)
        yield made


def said(host: Lab) -> str:
    """What p0 says of its planes; empty: nothing is wrong."""
    config = str(host.rendered("p0", "regauge/worker.toml"))
    done = host.run("p0", sys.executable, "-c", CHECK, config)
    if done.returncode:
        assert "ConfigError" in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("node", "fault", "message"),
    [
        ("p0", "link set cmp0 down", "planes.compute '10.210.0.0/16': interface cmp0 is down: ip link set dev cmp0 up"),
        ("p0", "link set mgm0 down", "planes.management 'mgm0': interface mgm0 is down: ip link set dev mgm0 up"),
        ("p0", "address add 10.210.0.77/24 dev biz0", "are both on biz0: .*: ip address del 10.210.0.77/24 dev biz0"),
        ("p0", "route add 10.210.0.13 via 10.211.0.13 dev biz0 table 100",
         r"control 10.210.0.13: the route to it leaves by biz0, of planes.business, .*: ip route replace 10.210.0.13/32 dev cmp0 table 100"),
        ("p0", "route add 10.211.0.13 via 10.210.0.13 dev cmp0",
         r"discovery.gateways\[0\] 10.211.0.13: the route to it leaves by cmp0, of planes.compute, .*: ip route replace 10.211.0.13/32 dev biz0"),
        ("p0", "route del 10.211.0.0/24 dev biz0", r"there is no route to it: ip route add 10.211.0.13/32 dev biz0"),
    ],
)  # fmt: skip
def test_a_fault_is_refused_and_its_command_mends_it(host: Lab, node: str, fault: str, message: str) -> None:
    assert not said(host)
    host.ip(node, *fault.split())
    found = re.search(message, text := said(host))
    assert found, text
    command = re.search(r": (ip [a-z0-9./ ]+)$", found[0])
    assert command is not None
    assert host.run("p0", *command[1].split()).returncode == 0
    assert not said(host)


@pytest.mark.parametrize(
    ("node", "fault", "message"),
    [
        ("switches", "link set p0-cmp0 down", "interface cmp0 has no carrier; look at its cable and the switch's port: ethtool cmp0"),
        ("p0", "address del 10.210.0.11/24 dev cmp0", r"transfer.nics\[0\] 'cmp0': the interface has no address: ip address add ADDRESS/BITS dev cmp0"),
        ("p0", "address del 10.211.0.11/24 dev biz0", "planes.business 'biz0': the interface has no address"),
        ("p0", "link del biz0", "planes.business 'biz0': is no address, network or interface of this host"),
    ],
)  # fmt: skip
def test_what_only_a_person_can_mend_is_refused_too(host: Lab, node: str, fault: str, message: str) -> None:
    host.ip(node, *fault.split())
    assert re.search(message, text := said(host)), text


def test_the_verb_starts_nothing(host: Lab) -> None:
    host.ip("p0", "route", "add", "10.211.0.13", "via", "10.210.0.13", "dev", "cmp0")
    config = str(host.rendered("p0", "regauge/worker.toml"))
    done = host.regauge("p0", "worker", "--role", "prefill", "--config", config)
    assert done.returncode == 2
    assert done.stderr.startswith("regauge: error: workers[0].url 10.211.0.13: the route to it leaves by cmp0")
    assert done.stdout == ""
