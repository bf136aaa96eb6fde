"""Names the part of a model in which a request's numbers first ceased to be finite.

The search is off the path of steps. It starts only when a result has such a request. It runs the request's tokens of that step
once more, over the same cache, and looks at the output of each part.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.attention.context import ForwardContext
from penstock.engine.core.plan import Bool, Int64, StepPlan
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.model import Carry, Model
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.runner.device.runtime import StepRuntime
from penstock.kernels.prepare_kv.reference import Rotary

log = logging.getLogger(__name__)

ELSEWHERE = "not looked for, as the request has lost its blocks since"
_ROWS_AT_ONCE = 256


class Again(NamedTuple):
    """Some tokens of a step, ready to run once more."""

    model: Model
    input_ids: torch.Tensor
    """[n]."""
    positions: torch.Tensor
    """[n]."""
    ctx: ForwardContext
    tokens: dict[int, slice]
    """Index into the plan's rows → which of the n tokens are that request's."""
    carry: Carry | None = None
    """From the pipeline stage before; None: the run begins with the tokens."""


Rerun = Callable[[list[int]], Again]
"""Prepares the tokens of some of a step's requests, given as indexes into the plan's rows."""


class Suspect(NamedTuple):
    """A step whose result is still to come."""

    finder: "NotFinite"
    plan: StepPlan
    tenants: Int64
    again: Rerun

    @property
    def live(self) -> Bool:
        """[r]: whether each row of the plan still belongs to the request of that step."""
        return self.finder.live(self)

    def explain(self, broken: Mapping[int, str]) -> dict[int, str]:
        """Says what is wrong with requests, and where it began."""
        return self.finder.explain(self, broken)


class NotFinite:
    """The search of one runner.

    Args:
        runtime: The device.
        max_num_seqs: Rows.
    """

    def __init__(self, runtime: StepRuntime, max_num_seqs: int) -> None:
        self._runtime = runtime
        self._tenants = np.zeros(max_num_seqs, np.int64)
        self._told = np.full(max_num_seqs, -1, np.int64)

    def watch(self, plan: StepPlan, again: Rerun) -> Suspect:
        """Takes in a plan that has been applied, and how its requests are run again."""
        if len(plan.released):
            self._tenants[plan.released] += 1
        return Suspect(self, plan, self._tenants[plan.rows], again)

    def live(self, step: Suspect) -> Bool:
        """[r]: whether each row of the plan still belongs to the request of that step."""
        return self._tenants[step.plan.rows] == step.tenants

    @torch.inference_mode()
    def explain(self, step: Suspect, broken: Mapping[int, str]) -> dict[int, str]:
        """Says what is wrong with requests, and where it began.

        Args:
            step: Their step.
            broken: Index into the plan's rows → what is wrong with that request's logits.

        Returns:
            The messages of the requests that have not been explained before.
        """
        # A step that was in flight when a request broke has it once more.
        fresh = [at for at in broken if self._told[step.plan.rows[at]] != step.tenants[at]]
        self._told[step.plan.rows[fresh]] = step.tenants[fresh]
        live = self.live(step)
        there = [at for at in fresh if live[at]]
        parts = self._looked_for(step, there) if there else {}
        return {at: f"{broken[at]}; the first values that are not: {parts.get(at, ELSEWHERE)}" for at in fresh}

    def _looked_for(self, step: Suspect, at: list[int]) -> dict[int, str]:
        """A search that fails ends no request beside those it is for: the step that it explains is over."""
        try:
            with self._runtime.main_stream():
                return name_first_part(*step.again(at))
        except GroupFailed:
            raise
        except Exception as error:
            # A step that has no room says so itself; the search needs more than steps were measured to need.
            if self._runtime.failure(error) is not None and not isinstance(error, torch.OutOfMemoryError):
                raise
            log.exception("where a request's numbers ceased to be finite could not be looked for")
            return dict.fromkeys(at, f"not found: {type(error).__name__}")


def name_first_part(
    model: Model,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    ctx: ForwardContext,
    tokens: Mapping[int, slice],
    carry: Carry | None = None,
) -> dict[int, str]:
    """For each of some requests of a step, the first part of the model whose output for that request is not finite.

    Args:
        model: That ran.
        input_ids: [n]: of the step.
        positions: [n].
        ctx: The step's.
        tokens: By request, whatever its number means: which of the n are its own.
        carry: From the pipeline stage before; None: there is none.
    """
    watch = _Watch(dict(tokens))
    watched = _WatchedContext(ctx.ops, ctx.kv_caches, ctx.layer_groups, watch, kv_scales=ctx.kv_scales)
    hidden = torch.empty(0)
    if carry is not None:
        watch.look("an earlier pipeline stage", carry.stream())
    for name, hidden in model.states(input_ids, positions, watched, carry):
        watch.look(name, hidden)
        if not watch.clean:
            break
    for row, own in watch.clean.items():
        # A part at a time: a long prompt's logits all together would be many times the size of a step.
        parts = () if model.lm_head is None else hidden[own].split(_ROWS_AT_ONCE)
        finite = all(bool(model.compute_logits(part).isfinite().all()) for part in parts)
        watch.found[row] = "nothing when the step was run again" if finite else "lm_head"
    return watch.found


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
        """Writes the step's keys and values, then attends."""
        self.watch.look(f"layers.{layer.index}.self_attn.qkv_proj", torch.cat((q, k, v), dim=-1))
        found = super().attend(layer, q, k, v, rotary, out)
        self.watch.look(f"layers.{layer.index}.self_attn", found)
        return found
