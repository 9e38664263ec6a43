"""This machine's own network, as the kernel tells it. Routes that lead elsewhere are in tests/planes: they take namespaces."""

import errno
import ipaddress
import socket

import pytest

from regauge.move.rtnetlink import Way, links, local_addresses, way


def test_links_are_all_interfaces_and_loopback_is_known() -> None:
    found = {link.name: link for link in links()}
    assert found.keys() == {name for _, name in socket.if_nameindex()}
    assert [link.name for link in found.values() if link.loopback] == ["lo"]
    assert found["lo"].up
    assert found["lo"].carrier


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1"])
def test_the_way_to_oneself_is_local(address: str) -> None:
    if ipaddress.ip_address(address) not in {each.address for each in local_addresses()} and ":" in address:
        pytest.skip("this machine has no IPv6")
    assert way(address) == Way("lo", local=True)


def test_what_the_kernel_refuses_is_an_error_and_where_nothing_leads_is_none() -> None:
    assert way("192.0.2.98", "192.0.2.99") is None  # that address is nobody's here
    with pytest.raises(OSError, match="Invalid argument") as error:
        way("192.0.2.98", "127.0.0.1")
    assert error.value.errno == errno.EINVAL
