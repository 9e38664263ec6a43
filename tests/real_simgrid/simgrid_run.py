"""Runs flows over links in SimGrid: JSON in, JSON out. For the system's Python, which has Debian's python3-simgrid.

In: `links` (name -> bytes per second) and `flows`, each with `at` (seconds), `size` (bytes) and `links`; `changes`: at `at` the link `link` gets `rate`; `defaults`: leave SimGrid as it is. Out: the second at which each flow ends.
SimGrid's own fluid model, with what it has of TCP switched off:
"""

import json
import sys

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone, this_actor

SETTINGS = (
    "network/model:CM02",  # plain max-min sharing
    "network/bandwidth-factor:1",  # all of a link's rate is payload
    "network/latency-factor:1",  # (and the links' latency is 0)
    "network/weight-S:0",  # no unfairness by round-trip time
    "network/TCP-gamma:0",  # no window
    "network/crosstraffic:0",  # no acknowledgements on the way back
    "maxmin/precision:1e-12",
    "surf/precision:1e-9",
)


def run(links: dict[str, float], flows: list[dict], changes: list[dict], defaults: bool) -> list[float]:  # type: ignore[type-arg]
    engine = Engine(["simgrid", "--log=root.thres:error", *(f"--cfg={each}" for each in SETTINGS if not defaults)])
    zone = NetZone.create_full_zone("all")
    made = {name: zone.create_link(name, rate).seal() for name, rate in links.items()}
    ended = [0.0] * len(flows)

    def send(index: int) -> None:
        this_actor.sleep_until(flows[index]["at"])
        Mailbox.by_name(str(index)).put("", int(flows[index]["size"]))

    def receive(index: int) -> None:
        Mailbox.by_name(str(index)).get()
        ended[index] = Engine.clock

    def change(at: float, link: str, rate: float) -> None:
        this_actor.sleep_until(at)
        made[link].set_bandwidth(rate)

    ends = []
    for index, flow in enumerate(flows):
        pair = [zone.create_host(f"{side}{index}", 1e9).seal() for side in ("from", "to")]
        route = [LinkInRoute(made[name]) for name in flow["links"]]
        zone.add_route(pair[0].netpoint, pair[1].netpoint, None, None, route, False)
        ends.append(pair)
    zone.seal()
    for index, (sender, receiver) in enumerate(ends):
        Actor.create("send", sender, send, index)
        Actor.create("receive", receiver, receive, index)
    for each in changes:
        Actor.create("change", ends[0][0], change, each["at"], each["link"], each["rate"])
    engine.run()
    return ended


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(run(asked["links"], asked["flows"], asked["changes"], asked["defaults"])))
