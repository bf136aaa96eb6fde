"""Linear layers by how tensor parallelism cuts them."""

from collections.abc import Mapping
from functools import partial

import torch

from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear_method import LinearMethod
from penstock.engine.models.layers.projection import LinearLayer, Projection, RotatedPairs
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import LinearPart, Weight, Weights


class _Linear:
    """One or several projections of one input, in the hands of a linear method."""

    def __init__(
        self,
        name: str,
        inputs: Span,
        outputs: Mapping[str, Span],
        bias: bool,
        build: Build,
        pairs: Mapping[str, RotatedPairs] | None = None,
    ) -> None:
        projections, offset = list[Projection](), 0
        for part, span in outputs.items():
            projections.append(Projection(part, inputs, span, offset, None if pairs is None else pairs.get(part)))
            offset += span.size
        self.layer = LinearLayer(build.name(name), tuple(projections), bias, build.dtype)
        self._method = build.linear_method(self.layer)

    @property
    def method(self) -> LinearMethod:
        """What multiplies."""
        return self._method

    def weights(self) -> Weights:
        """What the method asks for, under `part.weight` and the like."""
        found: Weights = {}
        for projection, module in zip(self.layer.projections, self.layer.modules, strict=True):
            place = LinearPart(self._method, projection.shape, projection.offset, projection.outputs.size, projection.narrow)
            for kind, spec in self._method.tensors(projection).items():
                spec.check(projection, f"{module}.{kind}")
                dim = None if spec.outputs is None else spec.outputs.dim
                load = partial(self._load, projection, kind)
                found[f"{projection.name}.{kind}"] = Weight(spec.shape, load, place, spec.dtypes, dim)
        return found

    def _load(self, projection: Projection, kind: str, value: torch.Tensor) -> None:
        self._method.load(projection, kind, value)

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self._method.finish()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, the rank's inputs] → [n, the rank's outputs]."""
        return self._method.apply(x)


class ColumnParallelLinear(_Linear):
    """Projections of one input, cut by their outputs: each rank holds a part of the outputs of each.

    Args:
        name: Of the layer within its module.
        in_features: Whole.
        outputs: By projection, the rank's.
        bias: Whether the projections have one.
        build: See Build.
        pairs: By projection, of those whose outputs the kernels take in another order than the checkpoint's.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        outputs: Mapping[str, Span],
        bias: bool,
        build: Build,
        pairs: Mapping[str, RotatedPairs] | None = None,
    ) -> None:
        super().__init__(name, Span(in_features, 0, in_features), outputs, bias, build, pairs)

    @property
    def sizes(self) -> list[int]:
        """The rank's outputs of each projection."""
        return [projection.outputs.size for projection in self.layer.projections]


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values, cut by heads; `pairs` are those of queries and keys."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        bias: bool,
        build: Build,
        pairs: RotatedPairs | None = None,
    ) -> None:
        q = build.shard.span(num_heads, "num_attention_heads").times(head_size)
        kv = build.shard.kv_heads(num_kv_heads).times(head_size)
        rotated = None if pairs is None else {"q_proj": pairs, "k_proj": pairs}
        super().__init__("qkv_proj", hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias, build, rotated)


class GateUpParallelLinear(ColumnParallelLinear):
    """A gated MLP's gate and up projection."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, build: Build) -> None:
        span = build.shard.span(intermediate_size, "intermediate_size")
        super().__init__("gate_up_proj", hidden_size, {"gate_proj": span, "up_proj": span}, bias, build)


class RowParallelLinear(_Linear):
    """One projection, cut by its inputs: the ranks' results are added up.

    Args:
        name: Of the projection.
        inputs: The rank's.
        out_features: Whole.
        bias: Whether it has one.
        build: See Build.
    """

    def __init__(self, name: str, inputs: Span, out_features: int, bias: bool, build: Build) -> None:
        super().__init__(name, inputs, {name: Span(out_features, 0, out_features)}, bias, build)
        self._comm, self._rank = build.comm, build.shard.rank

    def _load(self, projection: Projection, kind: str, value: torch.Tensor) -> None:
        super()._load(projection, kind, once_in_sum(kind, value, self._rank))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, the rank's inputs] → [n, out], the same on all ranks."""
        return self._comm.all_reduce(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """[n, the rank's inputs] → [n, out]: the rank's part of that sum."""
        return self._method.apply(x)


def once_in_sum(kind: str, value: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank loads of a tensor of a layer whose results are added up over the ranks: the bias counts on the first alone."""
    return torch.zeros_like(value) if kind == "bias" and rank else value


def stored_weights(method: LinearMethod, projection: Projection, rank: int = 0) -> Weights:
    """What a method asks for, with no place for adapters.

    Args:
        method: Of the layer.
        projection: Of it.
        rank: Of a layer whose results are added up over the ranks.
    """

    def load(kind: str, value: torch.Tensor) -> None:
        method.load(projection, kind, once_in_sum(kind, value, rank))

    found: Weights = {}
    for kind, spec in method.tensors(projection).items():
        spec.check(projection, f"{projection.name}.{kind}")
        dim = None if spec.outputs is None else spec.outputs.dim
        found[f"{projection.name}.{kind}"] = Weight(spec.shape, partial(load, kind), None, spec.dtypes, dim)
    return found
