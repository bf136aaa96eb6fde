"""Linear layers and the tensors that a checkpoint holds for them, described without any values."""

from typing import Final, NamedTuple

import torch

from penstock.engine.models.layers.shard import Span

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
"""What a tensor that is not quantized may be stored in."""


class RotatedPairs(NamedTuple):
    """Heads whose checkpoint rotates neighbouring elements, where kernels rotate elements half of `size` apart.

    Each head's even elements move before its odd ones. Queries and keys move alike, so that scores stay the same.
    """

    head_size: int
    """Elements of a head."""
    size: int
    """Those of each head that rotate."""
    start: int = 0
    """The first of them in the head."""

    def halves(self, outputs: torch.Tensor) -> torch.Tensor:
        """Whole heads along the first dimension → the same in the kernels' order."""
        end = self.start + self.size
        rotated = [*range(self.start, end, 2), *range(self.start + 1, end, 2)]
        within = torch.tensor([*range(self.start), *rotated, *range(end, self.head_size)])
        order = (torch.arange(0, len(outputs), self.head_size)[:, None] + within).flatten()
        return outputs.index_select(0, order.to(outputs.device))


class Projection(NamedTuple):
    """One projection of the checkpoint within a linear layer, such as `q_proj` within `qkv_proj`."""

    name: str
    inputs: Span
    outputs: Span
    offset: int
    """Of its first output among those that the rank's layer has."""
    pairs: RotatedPairs | None = None
    """Of its outputs; None: kernels take them in the checkpoint's order."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in], whole."""
        return self.outputs.total, self.inputs.total

    def narrow(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank's part of an adapter's factors, [r, in] and [out, r]."""
        return self.inputs.narrow(a, 1), self.ordered(self.outputs.narrow(b, 0))

    def ordered(self, outputs: torch.Tensor) -> torch.Tensor:
        """Values of each of the rank's outputs, which run along the first dimension, in the kernels' order."""
        return outputs if self.pairs is None else self.pairs.halves(outputs)


class LinearLayer(NamedTuple):
    """A linear layer of one rank: what a linear method is chosen by and made for."""

    name: str
    """As in `model.layers.0.self_attn.qkv_proj`."""
    projections: tuple[Projection, ...]
    """Their outputs are concatenated in this order; all have the same inputs."""
    bias: bool
    dtype: torch.dtype
    """Of the activations."""
    bare: bool = False
    """Whether it takes no adapter: layers of routers and experts, whose rows are not the step's tokens, and the one that latent
    attention takes apart."""

    @property
    def in_features(self) -> int:
        """The rank's inputs."""
        return self.projections[0].inputs.size

    @property
    def out_features(self) -> int:
        """The rank's outputs."""
        return sum(projection.outputs.size for projection in self.projections)

    @property
    def modules(self) -> tuple[str, ...]:
        """The projections' full names, by which checkpoints choose what is quantized, and how."""
        prefix = self.name.rpartition(".")[0]
        return tuple(f"{prefix}.{part.name}" if prefix else part.name for part in self.projections)


class Axis(NamedTuple):
    """The dimension of a stored tensor that runs along a projection's inputs or outputs."""

    dim: int
    step: int = 1
    """Features that one entry stands for: 8 where a word packs eight values, 128 where a scale covers a block."""
    shared: bool = False
    """Whether two ranks may hold the same entry: a block's scale serves both, a packed word cannot be cut."""


class TensorSpec(NamedTuple):
    """One tensor that a checkpoint holds for a projection, and how a rank's part is cut from it."""

    shape: tuple[int, ...]
    """Whole, as it is stored."""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    """Any of these is accepted."""
    outputs: Axis | None = None
    """None: every rank needs all of it, whatever its outputs."""
    inputs: Axis | None = None
    """None: every rank needs all of it, whatever its inputs."""

    def check(self, projection: Projection, name: str) -> None:
        """ValueError, naming the tensor, where a rank's part would cut through a packed entry."""
        for axis, span in ((self.outputs, projection.outputs), (self.inputs, projection.inputs)):
            if axis is None or axis.shared:
                continue
            if span.start % axis.step or (span.stop % axis.step and span.stop != span.total):
                raise ValueError(
                    f"{name}: a rank's features {span.start} to {span.stop} of {span.total} cut through an entry, which holds "
                    f"{axis.step}"
                )

    def cut(self, value: torch.Tensor, projection: Projection) -> torch.Tensor:
        """The rank's part of the whole tensor."""
        for axis, span in ((self.outputs, projection.outputs), (self.inputs, projection.inputs)):
            if axis is not None:
                first, last = span.start // axis.step, -(-(span.start + span.size) // axis.step)
                value = Span(value.shape[axis.dim], first, last - first).narrow(value, axis.dim)
        return value
