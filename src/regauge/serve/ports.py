"""Ports that nobody listens on."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

from regauge.errors import ConfigError

_TRIES: Final = 100


def free_ports(*hosts: str) -> list[int]:
    """Return a port for each of these numeric addresses that nobody listens on now; ports of one address are unlike.

    Raises ConfigError for an address that cannot be bound.
    """
    ports = []
    with contextlib.ExitStack() as stack:  # all are held until the last is found, so that none is found twice
        for host in hosts:
            sock = stack.enter_context(_socket(host))
            try:
                sock.bind((host, 0))
            except OSError as error:
                raise ConfigError(
                    f"{host} cannot be bound: {error.strerror}; give an address of this machine"
                ) from error
            ports.append(int(sock.getsockname()[1]))
    return ports


def consecutive_ports(count: int, *hosts: str) -> int:
    """Return the first of `count` ports in a row that nobody listens on now, at none of these numeric addresses.

    They are below those that the system gives, so that a server which loads a model for minutes, and listens then, finds them free still.
    Raises ConfigError if none are found, and for an address that cannot be bound.
    """
    free_ports(*hosts)
    for _ in range(_TRIES):
        first = random.randrange(20_000, 32_000 - count)  # noqa: S311  # below those that the system gives
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for host in set(hosts):
                for port in range(first, first + count):
                    stack.enter_context(_socket(host)).bind((host, port))
            return first
    raise ConfigError(f"{', '.join(hosts)}: no {count} free ports in a row were found")


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
