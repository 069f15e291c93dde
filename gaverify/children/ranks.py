"""The variables by which `torchrun` tells the ranks of one machine about each other."""

from __future__ import annotations

import os
from collections.abc import Mapping

HERE = "127.0.0.1"


def torchrun_variables(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """Returns the variables that torchrun gives to a process of one machine; gloo is kept on the loopback.

    Args:
        rank: From 0.
        ranks: How many processes there are.
        port: Where rank 0 listens.
    """
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": HERE,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()} | {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    }
