"""The command line's verb `topology`: what a bill of materials means, and the files that follow from it. Heavy imports are in the verb."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from regauge.fabric.topology import Topology

_KINDS = "ports, cabling, addresses, networkd, netplan, sysctl, nftables, qos, sonic, regauge, prometheus, drawing"


def arguments(job: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add the commands below the verb."""
    job("list", "list the shipped topologies")
    show = job("show", "say what a topology is made of: ports, bandwidth, addresses")
    render = job(
        "render",
        "write port maps, cabling, addresses, network files, switch configuration, regauge's own, and a drawing",
    )
    for each in (show, render):
        each.add_argument("topology", metavar="TOPOLOGY", help="a bill of materials (.toml), or a shipped one (`regauge topology list`)")  # fmt: skip
    render.add_argument("--out", metavar="DIR", required=True, help="folder to write into; files there are replaced, none is removed")  # fmt: skip
    render.add_argument("--host", metavar="NAME", default="", help="the files of one server")
    render.add_argument("--only", metavar="KIND", action="append", default=[], help=f"files of a kind, may be given again: {_KINDS}")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """List, show or render; return the exit code. Raises ConfigError."""
    if options.what == "list":
        return _list(options)
    from regauge.fabric.bill import load

    made = load(options.topology)
    return _show(options, made) if options.what == "show" else _render(options, made)


def _list(options: argparse.Namespace) -> int:
    from regauge.fabric.bill import load, shipped

    found = {name: load(name).description for name in shipped()}
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:{width}}  {text}")
    return 0


def _show(options: argparse.Namespace, made: Topology) -> int:
    from regauge.fabric.summary import plain, text

    print(json.dumps(plain(made), indent=2) if options.json else text(made))
    return 0


def _render(options: argparse.Namespace, made: Topology) -> int:
    from regauge.fabric.render import render

    files, folder = render(made, options.only, options.host), Path(options.out)
    try:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            if content.startswith("#!"):
                path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.filename}: {error.strerror}") from error
    if options.json:
        print(json.dumps({"out": str(folder), "files": list(files)}, indent=2))
    else:
        print(f"{folder}: {len(files)} files of {made.site}")
    return 0
