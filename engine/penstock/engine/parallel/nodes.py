"""Which nodes an engine has, and which one this is: from the flags, or from the group of a LeaderWorkerSet."""

from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.engine.config import ConfigError, ParallelConfig
from penstock.engine.parallel.layout import Layout

SIZE: Final = "LWS_GROUP_SIZE"
INDEX: Final = "LWS_WORKER_INDEX"
ADDRESS: Final = "LWS_LEADER_ADDRESS"
"""What LeaderWorkerSet sets in every container of a group: the number of its pods, the pod's own, and the name of the first."""


def placed(
    config: ParallelConfig,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    environment: Mapping[str, str],
) -> ParallelConfig:
    """Return the configuration with its nodes.

    Args:
        config: Without nodes.
        nnodes: The flag; None: not given. So are the next two.
        node_rank: Which node this is.
        master_addr: Address of node 0.
        environment: Of the process: decides what is not given.

    Raises:
        ConfigError: The flags do not fit each other, or the ranks the nodes.
    """
    nodes = _number(environment, SIZE) if nnodes is None else nnodes
    rank = _number(environment, INDEX) if node_rank is None else node_rank
    nodes, rank, address = nodes or 1, rank or 0, master_addr or environment.get(ADDRESS)
    if nodes == 1:
        if rank:
            raise ConfigError(f"--node-rank {rank} needs --nnodes: how many nodes there are")
        return config
    if address is None:
        raise ConfigError(f"--nnodes {nodes} needs --master-addr: the address of node 0 (or {ADDRESS})")
    if rank >= nodes:
        raise ConfigError(f"--node-rank {rank}: with --nnodes {nodes} the nodes are 0 to {nodes - 1}")
    placed = msgspec.structs.replace(config, nnodes=nodes, node_rank=rank, master_addr=address)
    Layout.of(placed)
    return placed


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}: LeaderWorkerSet sets a number")
    return int(text)
