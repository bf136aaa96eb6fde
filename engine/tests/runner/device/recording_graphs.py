"""CUDA graphs on CPU tensors: what a capture sees is recorded and replayed as a device would, Python frozen and addresses frozen.

What would go wrong on a GPU goes wrong here, and is said where a GPU would be silent:

- Nothing runs while it is captured: what a capture has written is undone, and its results are zeros until a replay.
- A replay repeats the calls with the addresses and the numbers that they had. A number that the host decided anew is not seen.
- A graph that reads a tensor which is gone by now raises (a GPU reads whatever lies there).
- What one graph leaves in the pool is garbage after the replay of another one that could have been given the same memory.
- A call whose result the host would have to wait for raises.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock.engine.runner.device.graphs.cuda import weak_tensor

GARBAGE = 0x7F
_UNINITIALISED = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")


class CaptureError(RuntimeError):
    """What a device would refuse while it captures."""


class Pool:
    """Memory that captures have allocated; kept to the end, so that an address means one tensor."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def adopt(self, tensor: torch.Tensor) -> None:
        """Takes in what a capture has made."""
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage.data_ptr(), storage)

    def free(self) -> list[torch.UntypedStorage]:
        """What nobody else has any more, so that a device would give it to the next capture."""
        return [storage for storage in self.storages.values() if torch._C._storage_Use_Count(storage._cdata) == 1]


@dataclass
class _Ref:
    """A tensor at an address; `owner` tells whether memory outside of the pool still exists."""

    tensor: torch.Tensor
    owner: StorageWeakRef | None

    def get(self) -> torch.Tensor:
        if self.owner is not None and self.owner.expired():
            raise CaptureError(
                f"a graph reads a tensor of shape {list(self.tensor.shape)} at 0x{self.tensor.data_ptr():x} that has been freed "
                "since it was captured"
            )
        return self.tensor


@dataclass
class _Call:
    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: list[tuple[int, _Ref]]
    """Which of the results go where."""

    def run(self) -> None:
        results = _tensors(self.function(*_thaw(self.args), **_thaw(self.kwargs)))
        for index, target in self.outputs:
            target.get().copy_(results[index])


class RecordedGraph:
    """Replays recorded launches."""

    def __init__(self, recorder: "_Recorder", owner: "RecordingGraphs") -> None:
        self.calls, self._overwrites, self._owner = recorder.calls, recorder.free, owner
        self._pool = recorder.pool
        """Lives as long as a graph that writes to it."""

    def replay(self) -> None:
        """Runs the calls; first spoils what another graph may have left in the memory that this one could use."""
        self._owner.replays += 1
        self._owner.inside += 1
        try:
            with torch.inference_mode():
                for storage in self._overwrites:
                    _bytes(storage).fill_(GARBAGE)
                for call in self.calls:
                    call.run()
        finally:
            self._owner.inside -= 1


class RecordingGraphs:
    """See `GraphRuntime`. Operations that are kernels on a device must be wrapped: what happens within them is no torch call."""

    def __init__(self) -> None:
        self.replays = 0
        """Graphs launched."""
        self.captures = 0
        self.kernels: list[str] = []
        """Wrapped operations that ran eagerly, by name."""
        self.inside = 0
        self._recorder: _Recorder | None = None
        self._stack = ExitStack()

    def kernel(self, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        """The same operation, recorded as one call."""
        name = name or function.__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._recorder is None or self.inside:
                if not self.inside:
                    self.kernels.append(name)
                return self._nested(function, args, kwargs)
            return self._recorder.record(name, lambda *a, **k: self._nested(function, a, k), args, kwargs, opaque=True)

        return call

    def wrap(self, ops: Any) -> Any:
        """A dataclass of operations, each of them wrapped."""
        values = {field.name: getattr(ops, field.name) for field in fields(ops)}
        return replace(ops, **{name: self.kernel(value, name) for name, value in values.items() if callable(value)})

    def new_pool(self) -> Pool:
        """Memory that graphs share which are never replayed at once."""
        return Pool()

    def begin(self, pool: Any) -> None:
        """From here on launches are recorded, not run, and what is allocated comes from `pool`."""
        if self._recorder is not None:
            raise CaptureError("a capture is under way")
        self._recorder = _Recorder(pool)
        self._stack.enter_context(self._recorder)

    def end(self) -> RecordedGraph:
        """What was launched since `begin`."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise CaptureError("no capture is under way")
        self._stack.close()
        recorder.undo()
        self.captures += 1
        return RecordedGraph(recorder, self)

    def abandon(self) -> None:
        """Ends a capture that has failed, if one is under way."""
        if self._recorder is not None:
            self._stack.close()
            self._recorder.undo()
            self._recorder = None

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without owning it: a tensor of a graph's pool that later captures may take again."""
        return weak_tensor(tensor)

    @property
    def capturing(self) -> bool:
        """Whether launches are recorded now."""
        return self._recorder is not None and not self.inside

    def _nested(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.inside += 1
        try:
            with _disable_current_modes():
                return function(*args, **kwargs)
        finally:
            self.inside -= 1


class _Recorder(TorchDispatchMode):
    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.free = pool.free()
        self.pool = pool
        self._before: dict[int, tuple[StorageWeakRef, torch.UntypedStorage, torch.Tensor]] = {}
        self._made: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name
        _refuse(func, args)
        if name in _UNINITIALISED:
            result = func(*args, **kwargs)
            self._adopt(result)
            return result
        return self.record(name, func, args, kwargs, opaque=func._schema.is_mutable)

    def record(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any, opaque: bool) -> Any:
        """Notes a call that may write its arguments (`opaque`) or only makes new tensors."""
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        with _disable_current_modes():
            if opaque:
                for tensor in _tensors((args, kwargs)):
                    self._keep(tensor)
            frozen = _freeze((args, kwargs), self.pool)
            result = function(*args, **kwargs)
            made = [
                (index, tensor)
                for index, tensor in enumerate(_tensors(result))
                if tensor.untyped_storage().data_ptr() not in given or not tensor.untyped_storage().nbytes()
            ]
            if opaque or made:
                for _, tensor in made:
                    self._adopt(tensor)
                outputs = [(index, _Ref(weak_tensor(tensor), None)) for index, tensor in made]
                self.calls.append(_Call(name, function, *frozen, outputs))
        return result

    @torch.inference_mode()
    def undo(self) -> None:
        """Leaves memory as if nothing had run."""
        for owner, storage, before in self._before.values():
            if not owner.expired():
                _bytes(storage).copy_(before)
        for storage in self._made:
            _bytes(storage).fill_(0)
        self._made.clear()

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.pool.storages and storage.data_ptr() not in self._before:
            self._before[storage.data_ptr()] = (StorageWeakRef(storage), storage, _bytes(storage).clone())

    def _adopt(self, tensor: torch.Tensor) -> None:
        self.pool.adopt(tensor)
        self._made.append(tensor.untyped_storage())


def _refuse(func: Any, args: Any) -> None:
    """Raises for what makes the host wait, or depends on what a device has computed."""
    name, tags = func._schema.name, func.tags
    waits = torch.Tag.data_dependent_output in tags or name in ("aten::_local_scalar_dense", "aten::item", "aten::equal")
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    elif torch.Tag.dynamic_output_shape in tags:
        waits = True
    if waits:
        raise CaptureError(f"{name} waits for the device, which a capture does not permit")
    if torch.Tag.nondeterministic_seeded in tags and name != "aten::dropout":
        raise CaptureError(f"{name} draws from a generator of the host's")


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _has_address(tensor: torch.Tensor) -> bool:
    """A weight that oneDNN has packed has none, and is a constant."""
    return tensor.layout is torch.strided


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    if isinstance(value, torch.Tensor):
        if _has_address(value):
            found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            found += _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            found += _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type | _Ref):
        for field in fields(value):
            found += _tensors(getattr(value, field.name))
    return found


def _freeze(value: Any, pool: Pool) -> Any:
    """The same with the numbers that it has now, and addresses instead of tensors."""
    if isinstance(value, torch.Tensor):
        if not _has_address(value):
            return value
        storage = value.untyped_storage()
        owned = storage.data_ptr() in pool.storages
        return _Ref(weak_tensor(value), None if owned else StorageWeakRef(storage))
    if isinstance(value, np.ndarray):
        return value.copy()
    return _rebuilt(value, lambda item: _freeze(item, pool))


def _thaw(value: Any) -> Any:
    return value.get() if isinstance(value, _Ref) else _rebuilt(value, _thaw)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, tuple):
        items = [change(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        new = object.__new__(type(value))
        for field in fields(value):
            object.__setattr__(new, field.name, change(getattr(value, field.name)))
        return new
    return value
