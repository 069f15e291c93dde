"""What a launcher such as torchrun tells the processes that it starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_HERE = "127.0.0.1"


def launched(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """Returns the variables that torchrun gives to a process of one machine; gloo is kept on the loopback.

    Args:
        rank: From 0.
        ranks: How many processes there are.
        port: Where rank 0 listens.
    """
    known = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": _HERE,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in known.items()} | {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    }


def free_port() -> int:
    """Returns a port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((_HERE, 0))
        return int(probe.getsockname()[1])
