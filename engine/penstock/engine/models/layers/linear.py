"""Linear layers by how tensor parallelism cuts them."""

import torch

from penstock.engine.models.layers.linear_method import LinearMethod
from penstock.engine.models.layers.shard import Shard
from penstock.engine.models.layers.weight import LinearPart, Weight, Weights


class _MergedColumnLinear:
    """Several projections of one input, concatenated: each rank holds a slice of the outputs of each."""

    def __init__(
        self, parts: dict[str, int], in_features: int, bias: bool, shard: Shard, method: LinearMethod, dtype: torch.dtype
    ) -> None:
        self._parts, self._in_features, self._bias, self._shard, self._method = parts, in_features, bias, shard, method
        self.sizes = [shard.size(size, f"the outputs of {name}") for name, size in parts.items()]
        """The rank's outputs of each part."""
        method.create(in_features, sum(self.sizes), bias, dtype)

    def weights(self) -> Weights:
        """Under `part.weight` and `part.bias`."""
        found: Weights = {}
        offset, shard = 0, self._shard
        for (name, total), size in zip(self._parts.items(), self.sizes, strict=True):
            part = LinearPart(self._method, offset, size, lambda a, b: (a, shard.narrow(b, 0)))
            found[f"{name}.weight"] = Weight((total, self._in_features), self._loader("weight", offset), part)
            if self._bias:
                found[f"{name}.bias"] = Weight((total,), self._loader("bias", offset))
            offset += size
        return found

    def _loader(self, kind: str, offset: int):
        return lambda value: self._method.load_shard(kind, self._shard.narrow(value, 0), offset)

    def finish(self) -> None:
        """After loading."""
        self._method.finish()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, the rank's outputs]."""
        return self._method.apply(x)


class ColumnParallelLinear(_MergedColumnLinear):
    """One projection, `name`, cut by its outputs."""

    def __init__(
        self, name: str, in_features: int, out_features: int, bias: bool, shard: Shard, method: LinearMethod, dtype: torch.dtype
    ) -> None:
        super().__init__({name: out_features}, in_features, bias, shard, method, dtype)


class QKVParallelLinear(_MergedColumnLinear):
    """Queries, keys and values, cut by heads."""

    def __init__(
        self, hidden_size: int, q_size: int, kv_size: int, bias: bool, shard: Shard, method: LinearMethod, dtype: torch.dtype
    ) -> None:
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        super().__init__(parts, hidden_size, bias, shard, method, dtype)


class GateUpParallelLinear(_MergedColumnLinear):
    """A gated MLP's gate and up projection."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, shard: Shard, method: LinearMethod, dtype: torch.dtype
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        super().__init__(parts, hidden_size, bias, shard, method, dtype)


class RowParallelLinear:
    """One projection, `name`, cut by its inputs: a rank's result is its part of a sum over the ranks."""

    def __init__(
        self, name: str, in_features: int, out_features: int, bias: bool, shard: Shard, method: LinearMethod, dtype: torch.dtype
    ) -> None:
        self._name, self._shape, self._shard, self._method = name, (out_features, in_features), shard, method
        self._bias = bias
        self._part = LinearPart(method, 0, out_features, lambda a, b: (shard.narrow(a, 1), b))
        method.create(shard.size(in_features, f"the inputs of {name}"), out_features, bias, dtype)

    def weights(self) -> Weights:
        """Under `name.weight` and `name.bias`."""
        found = {f"{self._name}.weight": Weight(self._shape, self._load_weight, self._part)}
        if self._bias:
            found[f"{self._name}.bias"] = Weight(self._shape[:1], self._load_bias)
        return found

    def _load_weight(self, value: torch.Tensor) -> None:
        self._method.load_shard("weight", self._shard.narrow(value, 1), 0)

    # Once in the sum.
    def _load_bias(self, value: torch.Tensor) -> None:
        self._method.load_shard("bias", value if self._shard.rank == 0 else torch.zeros_like(value), 0)

    def finish(self) -> None:
        """After loading."""
        self._method.finish()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, the rank's inputs] → [n, out]."""
        return self._method.apply(x)
