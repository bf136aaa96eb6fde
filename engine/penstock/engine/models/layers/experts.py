"""A router and the experts that it sends tokens to."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from penstock.engine.config import ConfigError
from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import stored_weights
from penstock.engine.models.layers.linear_method import (
    DeviceLinearMethod,
    FusableMethod,
    LinearMethod,
    MovableMethod,
    PackedMethod,
    UnquantizedLinearMethod,
)
from penstock.engine.models.layers.placement import Placement
from penstock.engine.models.layers.projection import LinearLayer, Projection
from penstock.engine.models.layers.shard import Span
from penstock.engine.models.layers.weight import Weight, Weights
from penstock.kernels.experts.reference import combine_rows
from penstock.kernels.experts.routing import Routing
from penstock.kernels.experts.table import AddressTable, ExpertTable, PackedExpertTable, alike
from penstock.kernels.experts.table import Gate as GateKind
from penstock.kernels.ops import Ops

FusedExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states, each token's experts and their weights → the sum of its experts' results."""


class Router:
    """Chooses each token's experts. Every rank has all of it.

    Args:
        hidden_size: Of a token.
        num_experts: To choose from.
        routing: The rule.
        biased: Whether logits have a bias.
        corrected: Whether the checkpoint holds a bias for the choice.
        in_float32: Whether logits are computed in float32 whatever the model's dtype.
        build: See Build.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        biased: bool,
        corrected: bool,
        in_float32: bool,
        build: Build,
    ) -> None:
        projection = Projection("gate", _whole(hidden_size), _whole(num_experts), 0)
        self._dtype = torch.float32 if in_float32 else build.dtype
        layer = LinearLayer(build.name("gate"), (projection,), biased, self._dtype, bare=True)
        if self._dtype is build.dtype:
            self._method = build.linear_method(layer)
        else:
            # The kernels for the model's dtype do not take float32.
            own = UnquantizedLinearMethod if build.device.type == "cpu" else DeviceLinearMethod
            self._method = own(layer, build.device)
        self._projection, self._routing, self._ops = projection, routing, build.ops
        self._bias = torch.empty(num_experts, dtype=torch.float32, device=build.device) if corrected else None

    def weights(self) -> Weights:
        """The router's, without a prefix."""
        found = stored_weights(self._method, self._projection)
        if self._bias is not None:
            found["gate.e_score_correction_bias"] = Weight(tuple(self._bias.shape), self._load_bias)
        return found

    def _load_bias(self, value: torch.Tensor) -> None:
        assert self._bias is not None
        self._bias.copy_(value)

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        self._method.finish()

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, hidden] → experts and weights, [n, top_k] each."""
        return self._ops.route(self._method.apply(hidden.to(self._dtype)), self._bias, self._routing)


class Gate(NamedTuple):
    """What an expert makes of its gate and its up projection."""

    kind: GateKind
    clamp: tuple[float, float] = (0.0, 0.0)
    """Slope and limit of the clamped one."""

    def product(self, ops: Ops) -> Callable[[torch.Tensor], torch.Tensor]:
        """The operation by itself."""
        if self.kind == "clamped_swiglu":
            return lambda gate_up: ops.clamped_swiglu(gate_up, *self.clamp)
        return {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_tanh_mul}[self.kind]


class Experts:
    """Gated MLPs, each in the hands of linear methods of its own.

    They are cut among the ranks by their inner features; or, with expert parallelism, each rank has some of them whole, in slots.
    A fused kernel takes them all where every method lets it read the weight; otherwise each expert runs by itself.

    Args:
        hidden_size: Of a token.
        inner_size: Of an expert, whole.
        num_experts: How many.
        top_k: Of them for a token.
        gate: See Gate.
        biased: Whether both layers of an expert have biases.
        build: See Build.
    """

    def __init__(
        self, hidden_size: int, inner_size: int, num_experts: int, top_k: int, gate: Gate, biased: bool, build: Build
    ) -> None:
        self._exchange, self.hidden_size, self.top_k, self.dtype = build.experts, hidden_size, top_k, build.dtype
        if build.experts is None:
            inner, self._rank = build.shard.span(inner_size, "moe_intermediate_size"), build.shard.rank
            self.placement, self._slots = Placement.linear(num_experts, 1), list(range(num_experts))
        else:
            inner, self._rank = _whole(inner_size), 0
            self.placement = build.experts.placed(num_experts)
            self._slots = list(self.placement.own(build.experts.rank))
        hidden = _whole(hidden_size)
        first, up = Projection("gate_proj", hidden, inner, 0), Projection("up_proj", hidden, inner, inner.size)
        down = Projection("down_proj", inner, hidden, 0)
        self._gate_up, self._down = list[LinearMethod](), list[LinearMethod]()
        for expert in self._slots:
            own = build.within(str(expert))
            layer = LinearLayer(own.name("gate_up_proj"), (first, up), biased, build.dtype, bare=True)
            self._gate_up.append(build.linear_method(layer))
            layer = LinearLayer(own.name("down_proj"), (down,), biased, build.dtype, bare=True)
            self._down.append(build.linear_method(layer))
        self._projections, self._sizes = (first, up, down), (hidden_size, inner.size)
        self._gate, self._biased = gate, biased
        self._ops = build.ops
        self._gated_mul = gate.product(build.ops)
        self._mlps = [partial(self._mlp, *methods) for methods in zip(self._gate_up, self._down, strict=True)]
        self._fused: FusedExperts | None = None
        self._table: AddressTable | None = None
        """Of the fused kernel; None: it takes no table of addresses."""

    @property
    def is_whole(self) -> bool:
        """Whether the results are whole sums, on every rank; else each rank has a part of them."""
        return self._exchange is not None

    def held(self, slot: int) -> list[torch.Tensor]:
        """After `finish`: the tensors of one of the rank's slots, which those of another expert may replace. ConfigError where
        they may not."""
        methods = self._gate_up[slot], self._down[slot]
        movable = [method for method in methods if isinstance(method, MovableMethod)]
        if len(movable) < len(methods):
            raise ConfigError(f"--enable-eplb: experts that {type(methods[0]).__name__} holds do not move")
        return [tensor for method in movable for tensor in method.held()]

    def place(self, placement: Placement) -> None:
        """Serves experts where they now are: the rank's slots have other weights, or other memory."""
        assert self._exchange is not None, "the rank has all experts"
        self.placement, self._slots = placement, list(placement.own(self._exchange.rank))
        if self._table is not None:
            self._table.find()

    def holds(self, expert: int) -> bool:
        """Whether an expert is in one of the rank's slots."""
        return expert in self._slots

    @property
    def fused(self) -> bool:
        """Whether one kernel takes all experts."""
        return self._fused is not None

    def weights(self) -> Weights:
        """By expert, without a prefix."""
        gate, up, down = self._projections
        found: Weights = {}
        for expert, gate_up, last in zip(self._slots, self._gate_up, self._down, strict=True):
            own = stored_weights(gate_up, gate) | stored_weights(gate_up, up) | stored_weights(last, down, self._rank)
            for name, weight in own.items():
                other = found.get(f"{expert}.{name}")  # an expert with several slots on this rank
                found[f"{expert}.{name}"] = weight if other is None else weight._replace(load=_to_both(other.load, weight.load))
        return found

    def finish(self) -> None:
        """Bring the weights into the kernels' form, after loading."""
        for method in (*self._gate_up, *self._down):
            method.finish()
        if self._fused is None:  # weights that come a second time lie where the first ones did, for graphs
            self._fused = self._fuse_plain() or self._fuse_packed()

    def _fuse_plain(self) -> FusedExperts | None:
        methods, count, kernel = (*self._gate_up, *self._down), len(self._gate_up), self._ops.experts
        found = [method for method in methods if isinstance(method, FusableMethod)]
        if kernel is None or len(found) < len(methods):
            return None
        weights, biases = [method.kernel_weight for method in found], [it.bias for it in found if it.bias is not None]
        own = (biases[:count], biases[count:]) if self._biased else None
        self._table = table = ExpertTable(weights[:count], weights[count:], *self._sizes, *self._gate, own)
        return lambda hidden, ids, weights: kernel(hidden, ids, weights, table)

    def _fuse_packed(self) -> FusedExperts | None:
        methods, count, kernel = (*self._gate_up, *self._down), len(self._gate_up), self._ops.packed_experts
        found = [method.packed_layer() for method in methods if isinstance(method, PackedMethod)]
        if kernel is None or len(found) < len(methods) or not (alike(found[:count]) and alike(found[count:])):
            return None
        self._table = table = PackedExpertTable(found[:count], found[count:], *self._sizes, *self._gate)
        return lambda hidden, ids, weights: kernel(hidden, ids, weights, table)

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[n, hidden] and each token's choices → [n, hidden]: the whole sum, or the rank's part of a sum over the ranks."""
        if self._exchange is not None:
            return self._exchange.run(self, hidden, ids, weights)
        return self._here(hidden, ids, weights)

    def _here(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same with slots of this rank."""
        if self._fused is not None:
            return self._fused(hidden, ids, weights)
        return self._ops.any_experts(hidden, ids, weights, self._mlps)

    def rows(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[m, hidden] and, of each row, one of the rank's slots, [m] int32 → [m, hidden]."""
        # A single choice of the weight 1 is the expert's own result.
        return self._here(x, slots[:, None], torch.ones(len(slots), 1))

    def combine(self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `combine_rows`: with the bits of a rank that has all experts."""
        return (combine_rows if self._fused is None else self._ops.combine_experts)(results, places, weights)

    def _mlp(self, gate_up: LinearMethod, down: LinearMethod, x: torch.Tensor) -> torch.Tensor:
        return down.apply(self._gated_mul(gate_up.apply(x)))


def _to_both(first: Callable[[torch.Tensor], None], second: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    def load(value: torch.Tensor) -> None:
        first(value)
        second(value)

    return load


def _whole(size: int) -> Span:
    return Span(size, 0, size)
