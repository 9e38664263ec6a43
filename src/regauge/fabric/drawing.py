"""The topology as an SVG: servers in a row, the compute plane's switch below them, the others' above. Light and dark.

More servers than fit are drawn as the first ones, how many more, and the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from regauge.fabric.plans import gbit
from regauge.fabric.topology import PlaneName, Server, Topology

WIDTH: Final = 1_200
MARGIN, GAP, GAP_FEW = 20, 6, 60
MOST: Final = 16
"""Boxes in the row; more servers are folded."""
FEW: Final = 4
BOX_MOST = 220
BAR = 34
SERVERS_TOP, BOX_HEIGHT = 196, 118
CHARACTER: Final = 0.56
"""Mean width of a letter by the size of the type, sans serif."""

_STYLE = """
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328 }
.title { font-size: 18px; font-weight: 600 } .small { font-size: 11px } .quiet { fill: #57606a }
.ground { fill: #ffffff } .box { fill: #f6f8fa; stroke: #8c959f }
.cable { fill: none; stroke-width: 1.5 } .dot { stroke: none }
.bar text, .bar .small { fill: #ffffff } .strong { font-weight: 600 }
.compute .cable { stroke: #b3500b; stroke-width: 3 } .compute rect, .compute .dot { fill: #b3500b }
.business .cable { stroke: #0969da } .business rect, .business .dot { fill: #0969da }
.management .cable { stroke: #1a7f37; stroke-dasharray: 4 3 } .management rect, .management .dot { fill: #1a7f37 }
.prefill { fill: #8250df } .decode { fill: #bf3989 } .gateway { fill: #57606a }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9da7b3 } .ground { fill: #0d1117 } .box { fill: #161b22; stroke: #6e7681 }
  .bar text, .bar .small { fill: #0d1117 }
  .compute .cable { stroke: #f0883e } .compute rect, .compute .dot { fill: #f0883e }
  .business .cable { stroke: #58a6ff } .business rect, .business .dot { fill: #58a6ff }
  .management .cable { stroke: #3fb950 } .management rect, .management .dot { fill: #3fb950 }
  .prefill { fill: #bc8cff } .decode { fill: #f778ba } .gateway { fill: #9da7b3 }
}
"""


@dataclass(frozen=True)
class _Box:
    x: float
    width: float
    server: Server | None
    """None: servers that are left out."""
    more: int = 0


def drawing(topology: Topology) -> dict[str, str]:
    """Return `topology.svg`."""
    boxes = list(_boxes(topology.servers))
    height = SERVERS_TOP + BOX_HEIGHT + 130
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(topology.site)}</title>',
        f'<desc id="d">{escape(_described(topology))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        _text(MARGIN, 30, topology.site, "title"),
        _text(MARGIN, 50, topology.description, "quiet"),
        *_plane(topology, "management", boxes, bar=72, index=1),
        *_plane(topology, "business", boxes, bar=122, index=0),
        *_plane(topology, "compute", boxes, bar=height - 88, index=0),
        *(part for box in boxes for part in _server(topology, box)),
        *_legend(height - 16),
        "</svg>",
    ]
    return {"topology.svg": "\n".join(parts) + "\n"}


def _described(topology: Topology) -> str:
    planes = "; ".join(
        f"{plane.name}: {plane.network}, {gbit(plane.speed)}, switch {plane.switch} with "
        f"{len(topology.links_of(plane.switch))} of {topology.switch(plane.switch).ports} ports"
        for plane in topology.planes.values()
    )
    return f"{len(topology.servers)} servers. {planes}."


def _boxes(servers: Sequence[Server]) -> Iterator[_Box]:
    shown: list[Server | int] = list(servers)
    if len(servers) > MOST:
        kept = MOST - 2
        shown = [*servers[:kept], len(servers) - kept - 1, servers[-1]]
    gap = GAP if len(shown) > FEW else GAP_FEW
    width = min(BOX_MOST, (WIDTH - 2 * MARGIN - gap * (len(shown) - 1)) / len(shown))
    x = (WIDTH - len(shown) * width - gap * (len(shown) - 1)) / 2
    for each in shown:
        yield _Box(x, width, None, each) if isinstance(each, int) else _Box(x, width, each)
        x += width + gap


def _plane(topology: Topology, name: PlaneName, boxes: Sequence[_Box], *, bar: int, index: int) -> Iterator[str]:
    """Draw a plane's bar and what hangs on it. `index`: of its cable at a server, so that two do not lie on each other."""
    plane = topology.planes[name]
    switch = topology.switch(plane.switch)
    used = sum(link.plane == name for link in topology.links_of(switch.name))
    below = bar > SERVERS_TOP
    yield f'<g class="{name}">'
    for box in boxes:
        nics = box.server.on(name) if box.server else ()
        if not nics:
            continue
        x = box.x + box.width * (0.5 if below else (0.38, 0.62)[index])
        start, end = (SERVERS_TOP + BOX_HEIGHT, bar) if below else (SERVERS_TOP, bar + BAR)
        yield f'<path class="cable" d="M{x:.1f} {start}V{end}"/>'
        yield f'<circle class="dot" cx="{x:.1f}" cy="{end}" r="4"/>'
    yield f'<g class="bar"><rect x="{MARGIN}" y="{bar}" width="{WIDTH - 2 * MARGIN}" height="{BAR}" rx="4"/>'
    vlan = f", VLAN {plane.vlan}" if plane.vlan is not None else ""
    left = f"{name}: {switch.name}, {used} of {switch.ports} ports of {gbit(switch.port_speed)}"
    roce = f", RoCE priority {plane.roce.priority}, DSCP {plane.roce.dscp}" if plane.roce else ""
    yield _text(MARGIN + 10, bar + 22, left, "strong")
    yield _text(WIDTH - MARGIN - 10, bar + 22, f"{plane.network}, MTU {plane.mtu}{vlan}{roce}", "small", anchor="end")
    yield "</g></g>"


def _server(topology: Topology, box: _Box) -> Iterator[str]:
    middle = box.x + box.width / 2
    yield f'<rect class="box" x="{box.x:.1f}" y="{SERVERS_TOP}" width="{box.width:.1f}" height="{BOX_HEIGHT}" rx="4"/>'
    if box.server is None:
        yield _text(middle, SERVERS_TOP + 56, "…", "title", anchor="middle")
        yield _text(middle, SERVERS_TOP + 80, f"{box.more} more", "small", anchor="middle")
        return
    server = box.server
    yield f'<rect class="{server.role}" x="{box.x:.1f}" y="{SERVERS_TOP}" width="{box.width:.1f}" height="6" rx="3"/>'
    lines = [(server.name, "strong"), (server.role, "small quiet")]
    if server.name == topology.gateway and server.role != "gateway":
        lines.append(("and gateway", "small quiet"))
    if server.accelerators:
        words = f"{len(server.accelerators)} x {server.accelerators[0].model}"
        lines += [(line, "small") for line in _wrapped(words, box.width)]
    y = SERVERS_TOP + 24
    for line, kind in lines:
        yield _text(middle, y, line, kind, anchor="middle", most=box.width - 4)
        y += 16
    if nics := server.on("compute"):
        foot = f"{len(nics)} x {gbit(nics[0].speed)}"
        yield _text(middle, SERVERS_TOP + BOX_HEIGHT - 8, foot, "small quiet", anchor="middle", most=box.width - 4)


def _wrapped(text: str, width: float) -> list[str]:
    """Cut a text into lines of a box, between words; three at most."""
    room, lines = int((width - 4) / (11 * CHARACTER)), [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if len(joined) <= room or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines[:3]


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start", most: float = 0.0) -> str:
    size = 11 if "small" in kind else 12
    squeezed = ""
    if most and len(text) * size * CHARACTER > most:
        squeezed = f' textLength="{most:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}"{squeezed}>{escape(text)}</text>'


def _legend(y: int) -> Iterator[str]:
    x = MARGIN
    for role in ("prefill", "decode", "gateway"):
        yield f'<rect class="{role}" x="{x}" y="{y - 9}" width="22" height="6" rx="3"/>'
        yield _text(x + 28, y, role, "small quiet")
        x += 100
    yield _text(WIDTH - MARGIN, y, "a line is all cables of a server to that switch; BMCs are on the management switch, too",
                "small quiet", anchor="end")  # fmt: skip
