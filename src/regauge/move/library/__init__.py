"""Transports whose bytes a foreign library moves (Mooncake, NIXL), each of its engines in a process of its own.

Such a library cannot be cancelled, waits for a silent peer under a lock, may crash with its peer, reads its settings
from the environment, and lets late writes land. A process can be killed: what it wrote, maps and listens to ends then
and there, by the kernel's word. That is the fence. Our session (`Listener`) proves the key and that the peer is
there before the library sees an address.

    wire        what a worker and its carrier say to each other
    process     the carrier's main: maps slabs, drives one library
    engine      what a library is to its carrier
    mooncake, nixl   the two of them
    carrier     the worker's end of a carrier: ask, kill
    pool        the carriers into which peers write
    transport, peer  what every such transport shares
"""
