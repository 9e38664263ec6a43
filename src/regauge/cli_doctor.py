"""The command line's verb `doctor`: its options, and how findings are shown. Heavy imports are in the functions."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from regauge.config import ServeConfig
    from regauge.fabric.expected import Expected
    from regauge.fabric.finding import Finding
    from regauge.fabric.host import Host

_COLOURS = {"error": "31", "warning": "33", "unknown": "36"}


def arguments(doctor: argparse.ArgumentParser) -> None:
    """Add the options of `regauge doctor`."""
    doctor.add_argument(
        "--topology", metavar="T", help="a bill of materials (a file, or a shipped name) that says what should be"
    )
    doctor.add_argument("--host", metavar="NAME", help="this server's name there; default: the host's own name")
    doctor.add_argument("--config", metavar="FILE", help="regauge's configuration on this host")
    doctor.add_argument(
        "--plane",
        metavar="PLANE",
        action="append",
        choices=("compute", "business", "management"),
        default=[],
        help="only this plane; may be given again",
    )
    doctor.add_argument(
        "--record", metavar="FILE", help="also write what the host answered, for looking into it elsewhere"
    )
    doctor.add_argument("--replay", metavar="FILE", help="look at a record instead of this host")
    doctor.add_argument(
        "--peer", metavar="ADDRESS[:PORT]", action="append", default=[],
        help="measure the way to it; may be given again; all: every peer of the topology"
    )  # fmt: skip
    doctor.add_argument("--listen", metavar="ADDRESS[:PORT]", action="append", default=[], help="answer such measurements until interrupted; may be given again")  # fmt: skip
    doctor.add_argument(
        "--key", metavar="FILE", help="the transfer key, which both sides have; default: the configuration's"
    )
    doctor.add_argument("--seconds", type=float, default=1.0, help="of bandwidth, in each direction, at most 10; 0: not measured; default %(default)s")  # fmt: skip
    doctor.add_argument("--bmc", metavar="FILE", help="ask the host's BMC by Redfish: TOML with user, password, and authority or verify (extra redfish)")  # fmt: skip
    doctor.add_argument("--list", action="store_true", help="list the checks")
    doctor.epilog = "Nothing is changed on the host. Exit codes: 0 nothing is wrong, 1 something is, 2 misuse."


def run(options: argparse.Namespace) -> int:
    """Examine a host; return 0 where nothing is wrong, else 1. Raises ConfigError."""
    from regauge.fabric import doctor
    from regauge.fabric import host as hosts

    if options.list:
        return _list(options.json, doctor.CHECKS)
    if options.listen:
        return _listen(options)
    if options.replay and (options.peer or options.bmc):
        raise ConfigError("--replay: a record has neither peers nor a BMC")
    seen: Host = hosts.load(Path(options.replay)) if options.replay else hosts.Live()
    recorder = hosts.Recorder(seen)
    expected = _expected(options, recorder)
    findings = doctor.examine(recorder, expected, options.plane)
    findings += [*_peers(options, recorder, expected), *(_bmc(options) if options.bmc else ())]
    found = doctor.sorted_findings(findings)
    if options.record:
        hosts.save(Path(options.record), recorder.record)
    if options.json:
        print(json.dumps({"green": doctor.green(found), "findings": [_plain(each) for each in found]}, indent=2))
    else:
        print(shown(found, len(doctor.CHECKS), colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0 if doctor.green(found) else 1


def _expected(options: argparse.Namespace, host: Host) -> Expected:
    from regauge.config import load
    from regauge.fabric import bill
    from regauge.fabric.expected import from_host, from_topology

    config: ServeConfig | None = load(Path(options.config)) if options.config else None
    if options.topology is None:
        if options.host is not None:
            raise ConfigError("--host: names a server of a topology: give --topology too")
        return from_host(host, config)
    return from_topology(bill.load(options.topology), options.host or socket.gethostname(), config)


def _key(options: argparse.Namespace, expected: Expected | None = None) -> bytes | None:
    from regauge.move.auth import load_key

    config = expected.config if expected else None
    named = options.key or (config.transfer.key_file if config else "")
    return load_key(Path(named)) if named else None


def _peers(options: argparse.Namespace, host: Host, expected: Expected) -> Iterator[Finding]:
    from regauge.fabric.check_peers import judge
    from regauge.fabric.host import number
    from regauge.fabric.peers import MAX_SECONDS, measure, split

    if not 0 <= options.seconds <= MAX_SECONDS:
        raise ConfigError(f"--seconds {options.seconds:g}: give 0 to {MAX_SECONDS:g}")
    if "all" in options.peer and not expected.peers:
        raise ConfigError("--peer all: needs --topology, which has the peers")
    planes = options.plane or expected.planes
    everybody = [each.address for each in expected.peers if each.plane in planes]
    named = [one for each in options.peer for one in (everybody if each == "all" else [each])]
    key = _key(options, expected) if named else None
    for address, port in map(split, named):
        peer = next((each for each in expected.peers if each.address == address), None)
        ports = [each for each in expected.ports if peer and each.plane == peer.plane and each.rail == peer.rail]
        mtu = number(host.read(f"/sys/class/net/{ports[0].interface}/mtu")) if ports else None
        source = str(ports[0].address) if ports and mtu else ""
        seen = measure(
            address,
            port,
            key,
            max(mtu or 1_500, ports[0].mtu or 0 if ports else 0),
            source=source,
            seconds=options.seconds,
        )
        yield from judge(seen, expected, mtu or 1_500)


def _bmc(options: argparse.Namespace) -> list[Finding]:
    from regauge.fabric import bill
    from regauge.fabric.bmc import load_access

    server = bill.load(options.topology).server(options.host or socket.gethostname()) if options.topology else None
    if server is None or server.bmc is None:
        raise ConfigError("--bmc: needs --topology with a server that has one")
    try:
        from regauge.fabric.redfish import check
    except ModuleNotFoundError as error:
        raise ConfigError(f"--bmc: needs sushy ({error}): pip install 'regauge[redfish]'") from error
    return list(check(server.bmc.url, load_access(Path(options.bmc))))


def _listen(options: argparse.Namespace) -> int:
    from contextlib import ExitStack

    from regauge.config import load
    from regauge.fabric.expected import Expected
    from regauge.fabric.peers import Listener, split

    key = _key(options, Expected("", config=load(Path(options.config)) if options.config else None))
    if key is None:
        raise ConfigError("--listen: needs --key FILE, the transfer key: whoever measures must have it")
    with ExitStack() as stack:
        for address, port in map(split, options.listen):
            try:
                made = stack.enter_context(Listener(address, port, key))
            except OSError as error:
                raise ConfigError(f"--listen {address}:{port}: {error.strerror}") from error
            print(f"listening at {made.address} port {made.port}; Ctrl-C ends it", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            signal.pause()
        except KeyboardInterrupt:
            return 0
    return 0


def _list(as_json: bool, checks: Any) -> int:
    told = {name: (check.__doc__ or "").strip() for name, check in checks.items()}
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(f"{name:14} {text}" for name, text in told.items()))
    return 0


def _plain(finding: Finding) -> dict[str, str]:
    return {name: getattr(finding, name) for name in finding.__struct_fields__}


def shown(findings: Sequence[Finding], checks: int, *, colour: bool) -> str:
    """Return findings as text, a section for each plane."""
    lines: list[str] = []
    for plane in dict.fromkeys(each.plane for each in findings):
        own = [each for each in findings if each.plane == plane]
        lines += [f"{plane}: {_counted(own)}", ""]
        for each in own:
            label = f"\x1b[{_COLOURS[each.severity]}m{each.severity}\x1b[0m" if colour else each.severity
            lines += [
                f"  {label}  {each.check}  {each.where}: {each.what}",
                f"      why   {each.why}",
                f"      mend  {each.mend}",
                "",
            ]
    left = [each for each in findings if each.severity != "unknown"]
    return "\n".join(
        [*lines, f"{checks} checks: {_counted(findings)}" if findings else f"{checks} checks: nothing is wrong"]
    ) + ("" if left or not findings else "; nothing is known to be wrong")


def _counted(findings: Sequence[Finding]) -> str:
    counts = {word: sum(each.severity == word for each in findings) for word in ("error", "warning", "unknown")}
    plural = {"error": "errors", "warning": "warnings", "unknown": "unknown"}
    return ", ".join(f"{count} {word if count == 1 else plural[word]}" for word, count in counts.items() if count)
