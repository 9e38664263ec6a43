"""Several NICs on a side: every slab on all of them, connections rail by rail, and transfers on the NIC with the least in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from links_rig import KEY, both, fill, mark_all

from regauge.config import TransferConfig
from regauge.errors import BoundsError, ConfigError, PeerLost, ProtocolError, TransportError
from regauge.move.memory import Slab
from regauge.move.rails import MAX_NICS, Rails
from regauge.move.shm import ShmTransport
from regauge.move.tcp import TcpTransport
from regauge.move.transports import open_rails
from regauge.plan.reference import transfer
from strategies import assert_same

TWO = ["127.0.0.2", "127.0.0.3"]


def rails(count: int, name: str) -> Rails:
    return Rails([TcpTransport(key=KEY, name=name, grants=True) for _ in range(count)])


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab(1 << 16, "kv") as made:
        yield made


@pytest.mark.parametrize(("own", "peers"), [(1, 1), (1, 3), (2, 2), (3, 2), (2, 4)])
def test_every_nic_of_the_peer_is_reached_and_own_ones_take_turns(own: int, peers: int, slab: Slab) -> None:
    with rails(own, "p") as near, rails(peers, "d") as far:
        far.register(slab)
        link = near.connect(far.export(), 5.0, peer="d")
        assert len(link.peers) == len(set(link.sessions)) == len(link.ways) == peers
        assert len(set(link.ways)) == min(own, peers)
        if own == peers:
            assert link.ways == tuple(range(own))  # rail by rail
        assert {each.session for each in far.inbound()} == set(link.sessions)
        assert [len(each.inbound()) for each in far.transports] == [1] * peers
        assert link.fence(5.0)
        assert far.fence_inbound(link.sessions, 5.0)
        assert not far.inbound()
        link.close()


def test_a_grant_holds_on_every_nic_until_it_is_taken_back(slab: Slab) -> None:
    with rails(2, "p") as near, rails(2, "d") as far, Slab(4096, "source") as source:
        near.register(source)
        far.register(slab)
        link = near.connect(far.export(), 5.0, peer="d")
        pieces = np.array([[source.address, slab.address + 64, 128]], np.int64)
        source.array[:128] = 7

        def lands(nic: int, grant: int) -> bool:
            ticket = link.peers[nic].post(pieces, 5.0, grant)
            assert ticket.wait(5.0)
            assert ticket.state == "landed" or isinstance(ticket.error, BoundsError)
            return ticket.state == "landed"

        assert not lands(0, 9)
        far.allow(link.sessions, 9, pieces[:, 1:])
        assert lands(0, 9)
        assert lands(1, 9)
        assert not lands(1, 8)
        assert far.revoke(link.sessions, 9, 5.0)
        assert not lands(0, 9)
        assert not lands(1, 9)
        link.close()


def test_a_nic_that_cannot_be_reached_leaves_no_connection_behind(slab: Slab) -> None:
    with rails(1, "p") as near, rails(2, "d") as far:
        far.register(slab)
        exports = far.export()
        far.transports[1].close()
        with pytest.raises(PeerLost):
            near.connect(exports, 5.0, peer="d")
        assert far.fence_inbound([each.session for each in far.inbound()] * 2 or ["", ""], 5.0)
        assert not far.inbound()


def test_a_slab_that_one_nic_refuses_is_on_none(slab: Slab) -> None:
    with rails(2, "d") as both_, Slab(4096, "kv") as other:
        both_.transports[1].register(other)
        with pytest.raises(TransportError, match="a slab named 'kv' is registered already"):
            both_.register(slab)
        assert not both_.transports[0].memory().table.regions


def test_what_cannot_be_is_refused() -> None:
    with TcpTransport(key=KEY, name="a") as tcp, ShmTransport(key=KEY, name="a") as shm:
        for bad in ([], [tcp, shm], [tcp] * (MAX_NICS + 1)):
            with pytest.raises(ConfigError, match=f"give 1 to {MAX_NICS} of one kind"):
                Rails(bad)
        with pytest.raises(ConfigError, match="give each of them once"):
            Rails([tcp, tcp], ["a", "a"])
        with pytest.raises(ProtocolError, match="d exports 0 NICs"):
            Rails([tcp]).connect([], 1.0, peer="d")


def test_the_named_nics_are_opened_and_only_over_tcp() -> None:
    config = msgspec.convert({"transport": "tcp", "nics": TWO}, TransferConfig)
    with open_rails(config, key=KEY, name="x") as made:
        assert made.names == tuple(TWO)
        assert [each.address.split(":")[0] for each in made.transports] == TWO
        assert made.caps.checks_grants
    with open_rails(TransferConfig(transport="shm"), key=KEY, name="x") as made:
        assert made.names == ("127.0.0.1",)
    with pytest.raises(ConfigError, match=r"transfer\.nics is for tcp; shm takes"):
        open_rails(TransferConfig(transport="shm", nics=TWO), key=KEY, name="x")
    with pytest.raises(ConfigError, match="give each of them once"):
        open_rails(TransferConfig(transport="tcp", nics=["127.0.0.2"] * 2), key=KEY, name="x")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        open_rails(TransferConfig(transport="tcp", nics=["127.0.0.2", "203.0.113.7"]), key=KEY, name="x")


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["mapped", "staged"])
async def test_transfers_spread_over_the_nics_and_arrive_as_they_are(mode: str) -> None:
    async with both("direct", "tcp", mode=mode, nics=TWO) as b:
        fill(b.source, 3)
        src, dst = b.pools()
        want = dst.copy()
        under_way = []
        for name in "abcd":
            under_way.append((b.expect(name, 40), await b.offer(name, 40)))
            await under_way[-1][1].wait_granted()
            taken = np.array(b.source_pool.owned(name))
            transfer(src.layout, dst.layout, src.memory, want.memory, src.offsets(taken),
                     want.offsets(np.array(b.pool.owned(name))), (0, 40))  # fmt: skip
        for arrival, sent in under_way:
            mark_all(sent, 40)
            sent.finish(b"")
            await asyncio.wait_for(arrival, 20)
        assert_same(dst, want)
        landed = [sum(x.nbytes for x in each.inbound()) for each in b.into._rails.transports]
        assert landed[0] == landed[1] > 0
        assert [state.nic for state in b.into.flow()] == TWO


@pytest.mark.anyio
async def test_a_nic_whose_connection_breaks_ends_the_link_and_its_transfers_go_on_over_a_new_one() -> None:
    async with both("direct", "tcp", mode="staged", nics=TWO) as b:
        fill(b.source, 4)
        src, dst = b.pools()
        want = dst.copy()
        first = b.expect("a", 40), await b.offer("a", 40)
        await first[1].wait_granted()
        second = b.expect("b", 40), await b.offer("b", 40)
        await second[1].wait_granted()
        nics = {t.transfer: t.legs[0].nic for t in b.into.transfers()}
        assert nics == {"a": 0, "b": 1}
        broken = b.into._rails.transports[1]
        [session] = [x.session for x in broken.inbound()]
        assert await asyncio.to_thread(broken.fence_inbound, session, 5.0)
        for name, (arrival, sent) in (("b", second), ("a", first)):
            taken = np.array(b.source_pool.owned(name))
            transfer(src.layout, dst.layout, src.memory, want.memory, src.offsets(taken),
                     want.offsets(np.array(b.pool.owned(name))), (0, 40))  # fmt: skip
            mark_all(sent, 40)
            sent.finish(name.encode())
            assert (await asyncio.wait_for(arrival, 20)).handover == name.encode()
        assert_same(dst, want)
        [again] = [x.session for x in broken.inbound()]
        assert again != session
