"""The command line's verb `doctor`: its options, and how findings are shown. Heavy imports are in the functions."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    doctor.add_argument("--list", action="store_true", help="list the checks")
    doctor.epilog = "Nothing is changed on the host. Exit codes: 0 nothing is wrong, 1 something is, 2 misuse."


def run(options: argparse.Namespace) -> int:
    """Examine a host; return 0 where nothing is wrong, else 1. Raises ConfigError."""
    from regauge.fabric import doctor
    from regauge.fabric import host as hosts

    if options.list:
        return _list(options.json, doctor.CHECKS)
    seen: Host = hosts.load(Path(options.replay)) if options.replay else hosts.Live()
    recorder = hosts.Recorder(seen)
    found = doctor.sorted_findings(doctor.examine(recorder, _expected(options, recorder), options.plane))
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
