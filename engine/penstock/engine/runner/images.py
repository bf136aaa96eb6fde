"""Embeddings of images, and the rows whose prompts hold them. Changes only by what a plan says."""

from collections.abc import Callable

import torch

from penstock.engine.core.plan import Int32, StepPlan, ints
from penstock.engine.multimodal.pixels import Pixels
from penstock.prompt.hashing import PromptItem


class Images:
    """What a rank keeps of images.

    Args:
        encode: Makes an image's embeddings, [tokens, hidden].
    """

    def __init__(self, encode: Callable[[Pixels], torch.Tensor]) -> None:
        self._encode = encode
        self._embeddings: dict[str, torch.Tensor] = {}
        self._items: dict[int, tuple[PromptItem, ...]] = {}

    @property
    def names(self) -> set[str]:
        """Images whose embeddings are there."""
        return set(self._embeddings)

    def take_in(self, plan: StepPlan) -> None:
        """Rows and embeddings that go, and rows that come."""
        for name in plan.encoder_frees:
            self._embeddings.pop(name, None)
        if self._items:
            for row in ints(plan.released):
                self._items.pop(row, None)
        for admission in plan.admissions:
            if admission.items:
                self._items[admission.row] = admission.items

    def encode(self, plan: StepPlan) -> None:
        """Makes the embeddings that the plan asks for, an image at a time: its numbers do not depend on others."""
        for run in plan.encoder_runs:
            self._embeddings[run.identifier] = self._encode(run.pixels)

    def merge(
        self, plan: StepPlan, starts: Int32, embed: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor | None, dict[int, str]]:
        """The step's embeddings, those of images among them.

        Args:
            plan: The step's.
            starts: [r]: the position of each row's first token.
            embed: Embeds the step's tokens, [n, hidden].

        Returns:
            [n, hidden], or None where no token is an image's; and why rows, as indexes into the plan's, cannot be computed.
        """
        if not self._items:
            return None, {}
        merged, failed, first = None, dict[int, str](), 0
        for at, (row, start, count) in enumerate(zip(ints(plan.rows), ints(starts), ints(plan.num_new_tokens), strict=True)):
            for item in self._items.get(row, ()):
                begin, end = max(item.start, start), min(item.start + item.length, start + count)
                if begin >= end:
                    continue
                found = self._embeddings.get(item.identifier)
                if found is None or len(found) != item.length:
                    there = "none are there" if found is None else f"it has {len(found)}"
                    failed[at] = f"the image at token {item.start} needs {item.length} embeddings, and {there}"
                    continue
                merged = embed() if merged is None else merged
                place = first + begin - start
                merged[place : place + end - begin] = found[begin - item.start : end - item.start]
            first += count
        return merged, failed

    def forget(self) -> None:
        """Drops all embeddings."""
        self._embeddings.clear()

    def reset(self) -> None:
        """No row has a request, and nothing is kept."""
        self.forget()
        self._items.clear()
