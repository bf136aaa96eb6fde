"""Where a model's numbers first ceased to be finite. Looked for only when a request's logits are not: the step is run once more,
part by part, over the same tokens and cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from penstock.engine.attention.context import ForwardContext
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.model import Model
from penstock.kernels.prepare_kv.reference import Rotary

_ROWS_AT_ONCE = 256


def name_first_part(
    model: Model, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext, tokens: Mapping[int, slice]
) -> dict[int, str]:
    """For each of some requests of a step, the first part of the model whose output for that request is not finite.

    Args:
        model: That ran.
        input_ids: [n]: of the step.
        positions: [n].
        ctx: The step's.
        tokens: By request, whatever its number means: which of the n are its own.
    """
    watch = _Watch(dict(tokens))
    watched = _WatchedContext(ctx.ops, ctx.kv_caches, ctx.layer_groups, watch)
    hidden = torch.empty(0)
    for name, hidden in model.states(input_ids, positions, watched):
        watch.look(name, hidden)
        if not watch.clean:
            break
    for row, own in watch.clean.items():
        # A part at a time: a long prompt's logits all together would be many times the size of a step.
        parts = () if model.lm_head is None else hidden[own].split(_ROWS_AT_ONCE)
        finite = all(bool(model.compute_logits(part).isfinite().all()) for part in parts)
        watch.found[row] = "nothing when the step was run again" if finite else "lm_head"
    return watch.found


def located(message: str, part: str) -> str:
    """What is wrong with a request's logits, and where it began."""
    return f"{message}; the first values that are not: {part}"


@dataclass
class _Watch:
    clean: dict[int, slice]
    """Rows whose numbers have all been finite so far, and their tokens."""
    found: dict[int, str] = field(default_factory=dict)

    def look(self, name: str, values: torch.Tensor) -> None:
        """Takes in a part's output, [n, …]."""
        finite = values.flatten(1).isfinite().all(1)
        for row, tokens in list(self.clean.items()):
            if not bool(finite[tokens].all()):
                self.found[row] = name
                del self.clean[row]


@dataclass(frozen=True)
class _WatchedContext(ForwardContext):
    watch: _Watch

    def attend(
        self,
        layer: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ForwardContext."""
        self.watch.look(f"layers.{layer.index}.self_attn.qkv_proj", torch.cat((q, k, v), dim=-1))
        found = super().attend(layer, q, k, v, rotary, out)
        self.watch.look(f"layers.{layer.index}.self_attn", found)
        return found
