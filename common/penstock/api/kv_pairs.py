"""Which replicas of a model can hand KV pages over to each other. Pure."""

from typing import Final

LOOKUPS: Final = ("ngram", "suffix")
"""Methods of speculative decoding whose drafts keep no pages of their own."""


def alike(tensor: int, pipeline: int, drafts: str | None) -> dict[str, int]:
    """Return what must be equal at both ends of a pair, by its name in `parallelism`.

    Each pipeline stage reads the pages of its own layers. Heads that are cut among another number of ranks are put together, but
    the layers of a draft model are on every rank: beside them, blocks of other sizes hold other numbers of tokens.

    Args:
        tensor: Ranks of a pipeline stage.
        pipeline: Stages.
        drafts: Method of speculative decoding; None: there is none.
    """
    return {"pipeline": pipeline} if drafts is None or drafts in LOOKUPS else {"pipeline": pipeline, "tensor": tensor}
