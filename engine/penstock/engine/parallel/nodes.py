"""Which nodes an engine has, and what this one has: from the flags, or from the group of a LeaderWorkerSet."""

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


def cores_placed(
    config: ParallelConfig, local: int | None, start_rank: int | None, address: str | None, environment: Mapping[str, str]
) -> ParallelConfig:
    """Return the configuration with the data-parallel ranks of this node.

    Args:
        config: With all of them.
        local: How many this node has; None: not given. So are the next two.
        start_rank: The first of these.
        address: Of the node of rank 0.
        environment: Of the process: decides what is not given.

    Raises:
        ConfigError: The flags do not fit each other.
    """
    size = config.data_parallel_size
    if local is None:
        for flag, given in (("--data-parallel-start-rank", start_rank), ("--data-parallel-address", address)):
            if given is not None:
                raise ConfigError(f"{flag} {given} needs --data-parallel-size-local: how many ranks this node has")
        return config
    start = local * (_number(environment, INDEX) or 0) if start_rank is None else start_rank
    if start + local > size:
        told = f"rank {start}" if local == 1 else f"ranks {start} to {start + local - 1}"
        raise ConfigError(f"--data-parallel-size {size}: this node would have {told}, and the last one is {size - 1}")
    address = address or environment.get(ADDRESS)
    if local < size and address is None:
        raise ConfigError(
            f"--data-parallel-size-local {local} of --data-parallel-size {size} needs --data-parallel-address: the address of "
            f"the node of rank 0 (or {ADDRESS})"
        )
    return msgspec.structs.replace(
        config, data_parallel_size_local=local, data_parallel_start_rank=start, data_parallel_address=address
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}: LeaderWorkerSet sets a number")
    return int(text)
