"""The proposer of a runner, with what it needs of the target model: alike on every device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch

from penstock.engine.cache.layout import KVGroup
from penstock.engine.config import EngineConfig
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.draft_head import DraftHead
from penstock.engine.models.model import Model
from penstock.engine.runner.draft_head import Following, HeadProposer, TappedModel
from penstock.engine.runner.draft_model import DraftModel, Sight
from penstock.engine.runner.draft_sampler import DraftSampler
from penstock.engine.runner.input_batch import StepArrays
from penstock.engine.spec.checkpoint import DraftCheckpoint
from penstock.engine.spec.proposer import Proposer
from penstock.kernels.ops import Ops


class Drafter(NamedTuple):
    """A proposer that has weights."""

    proposer: DraftModel | HeadProposer
    sampler: DraftSampler
    arrays: StepArrays
    """Of its passes."""

    def bind(
        self,
        draft_model: Model | DraftHead,
        target: Model,
        kv_caches: list[torch.Tensor],
        images: Following | None = None,
        sight: Sight | None = None,
    ) -> None:
        """Gives it the draft model or the head, loaded, with the caches of its layers, the target, and what a head and a draft
        model may see of images."""
        if isinstance(self.proposer, HeadProposer):
            head = cast("DraftHead", draft_model)
            head.share(target)
            self.proposer.bind(head, kv_caches, images)
        else:
            self.proposer.bind(cast("Model", draft_model), kv_caches, sight)


def states_of_target(drafter: DraftCheckpoint | None, most: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Where the target leaves the states of a step's tokens, `most` of them, for a head; None: there is no head."""
    if drafter is None or drafter.head is None:
        return None
    return torch.zeros(most, drafter.head.states_size, dtype=dtype, device=device)


def tapped(
    model: Model, drafter: DraftCheckpoint | None, states: torch.Tensor | None, layers: range | None = None
) -> Model | TappedModel:
    """The target, or its last pipeline stage of these `layers`, which leaves its states where a head finds them."""
    head = None if drafter is None else drafter.head
    return model if head is None or states is None else TappedModel(model, head.aux_layers, states, layers)


def new_drafter(
    config: EngineConfig,
    target: DecoderConfig,
    drafter: DraftCheckpoint,
    ops: Ops,
    layer_groups: Sequence[int],
    groups: Sequence[KVGroup],
    arrays_of: Callable[[int], StepArrays],
    states: torch.Tensor | None,
    device: torch.device,
) -> Drafter:
    """The proposer of a draft model or a head.

    Args:
        config: The engine's.
        target: The model that is served.
        drafter: The draft model or the head.
        ops: Its operations.
        layer_groups: Of its layers: numbers of KV groups.
        groups: The KV groups of both.
        arrays_of: Makes what brings passes of so many tokens at most to the device.
        states: As of `states_of_target`.
        device: Where it runs.
    """
    scheduler, speculative = config.scheduler, config.speculative
    assert speculative is not None
    rows, drafts = scheduler.max_num_seqs, speculative.num_speculative_tokens
    sampler = DraftSampler(rows, target.vocab_size, device, draws=speculative.draft_sample_method == "probabilistic")
    limits = {"max_num_seqs": rows, "max_model_len": config.model.max_model_len, "num_drafts": drafts, "sampler": sampler}
    proposer: Proposer
    if states is None:
        block_size, most = min(group.block_size for group in groups), max(scheduler.max_num_batched_tokens, rows)
        arrays = arrays_of(DraftModel.most_tokens(most, rows, block_size, drafts))
        proposer = DraftModel(ops, layer_groups, arrays, block_size, **limits)
    else:
        arrays = arrays_of(len(states))
        proposer = HeadProposer(ops, layer_groups, arrays, states, hidden_size=drafter.config.hidden_size, **limits)
    return Drafter(proposer, sampler, arrays)
