"""Which ranks keep pages. Ranks that have the same ones leave them to the first of them on their node."""


def keeper_of(rank: int, same: int, per_node: int) -> int:
    """Return the rank that stores, brings and sends the pages of a rank.

    Args:
        rank: Among those of all pipeline stages.
        same: Neighbouring ranks that have the same pages.
        per_node: Ranks of a node.
    """
    return max(rank - rank % same, rank - rank % per_node)
