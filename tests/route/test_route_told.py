"""What the router is told, in the cheaper ways."""

from __future__ import annotations

from route_rig import NIC, cluster, link, placed

from regauge.route.cluster import Request


def test_the_state_of_a_nic_is_told_once_for_all_of_its_links() -> None:
    by_links, by_nic = cluster(3, 2), cluster(3, 2)
    for i in range(3):
        by_links.link(link(i, 0, backlog_bytes=int(3 * NIC)), 1.0)
    by_nic.nic("d0", int(3 * NIC), 1.0)
    by_nic.nic("nobody", 1, 1.0)
    for i in range(4):
        request = Request(f"r{i}", tokens=1000)
        assert placed(by_links, request, 1.0) == placed(by_nic, request, 1.0)
    by_nic.nic("d1", 0, 2.0, NIC / 2)
    assert by_nic.workers["d1"].nic.rate == NIC / 2
