"""Records what a function of torch and native operations does, and does it again without the function.

What a CUDA graph is to a GPU: operations with the addresses of their arguments, run one after the other by one native call. The
interpreter, torch's dispatcher and the allocator, which take most of a small model's step, have no part in it. So whatever
changes from run to run must lie in tensors or arrays that stay where they are. A function that asks what they hold, to branch on
it or to size a tensor, cannot be recorded: torch marks such operations, and they are refused by name.
"""

import ctypes
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_CALL = struct.Struct("25q")
_FLOAT = struct.Struct("f")
_BITS = struct.Struct("I")
_EMPTY = {torch.empty, torch.empty_like, torch.Tensor.new_empty}
_CONVERSIONS = {torch.Tensor.float}
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__bool__}
"""What hands values to the host by no operation that torch marks."""
_DESCRIPTIONS = {
    *(torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.element_size),
    *(torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.Tensor.storage_offset, torch.Tensor.dim),
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "dtype", "ndim", "layout")),
}
"""What says how a tensor lies in memory, and nothing of what it holds: three of four questions that a model's step asks torch."""


class NotTapeable(Exception):
    """The function does what no tape can do again; the message names it."""


class Pool:
    """Memory of intermediate tensors, taken again when nothing refers to it any more; tapes that never run at once share one."""

    def __init__(self) -> None:
        self._free: list[np.ndarray[Any, Any]] = []
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}
        """All, by address."""

    @property
    def nbytes(self) -> int:
        """Of all memory, of which the system gives what is written."""
        return sum(block.nbytes for block in self._blocks.values())

    def empty_like(self, like: torch.Tensor) -> torch.Tensor:
        """Contiguous, of the same shape and dtype."""
        size = like.numel() * like.element_size()
        fitting = [at for at, block in enumerate(self._free) if block.nbytes >= size]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda at: self._free[at].nbytes))
        else:
            # A power of two: tapes of ever more rows would each find all blocks too small.
            block = np.empty(1 << max(size - 1, 63).bit_length(), np.uint8)
            self._blocks[block.ctypes.data] = block
        # torch holds this view as long as any tensor refers to the memory.
        view = block[:]
        weakref.finalize(view, self._free.append, block)
        return torch.from_numpy(view)[:size].view(like.dtype).view(like.shape)

    def alias(self, value: Any) -> Any:
        """A tensor at the same place that does not keep its memory from being taken again, in lists and tuples as well; anything
        else is returned as it is."""
        if isinstance(value, list | tuple):
            return [self.alias(item) for item in value] if isinstance(value, list) else tuple(self.alias(item) for item in value)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        block = self._blocks.get(value.untyped_storage().data_ptr())
        if block is None:
            return value
        memory = torch.from_numpy(block)[: block.nbytes // value.element_size() * value.element_size()]
        return memory.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())


class Tape:
    """What was recorded."""

    def __init__(self, steps: Sequence[Callable[[], object]], result: torch.Tensor) -> None:
        self._steps = steps
        self.result = result
        """Written anew by each run; a run or a recording of another tape of the pool may take its memory."""

    def run(self) -> torch.Tensor:
        """Does it all again; returns `result`."""
        for step in self._steps:
            step()
        return self.result


class Recording:
    """Operations as they happen.

    Args:
        replay: The library's `penstock_replay`.
    """

    def __init__(self, replay: Callable[[Any, int], None]) -> None:
        self._replay = replay
        self._steps: list[Callable[[], object]] = []
        self._calls: list[bytes] = []

    def native(self, op: int, arguments: Sequence[int | float | None]) -> None:
        """A call of the library's operation with this number."""
        packed = [_packed(argument) for argument in arguments]
        self._calls.append(_CALL.pack(op, *packed, *[0] * (24 - len(packed))))

    def python(self, function: Callable[[], object]) -> None:
        """Anything else."""
        self._close()
        self._steps.append(function)

    def tape(self, result: torch.Tensor) -> Tape:
        """All of it."""
        self._close()
        return Tape(self._steps, result)

    def _close(self) -> None:
        if self._calls:
            self._steps.append(_Run(self._replay, self._calls))
            self._calls = []


class _Run:
    """Native calls in a row."""

    def __init__(self, replay: Callable[[Any, int], None], calls: Sequence[bytes]) -> None:
        self._replay, self._count = replay, len(calls)
        self._calls = ctypes.create_string_buffer(b"".join(calls))
        self._address = ctypes.addressof(self._calls)

    def __call__(self) -> None:
        self._replay(self._address, self._count)


class _NoQuestions(TorchDispatchMode):
    """Refuses operations whose answer, or whose result's shape, depends on what tensors hold.

    Args:
        asker: What torch was asked for, of which they are a part.
    """

    def __init__(self, asker: Any) -> None:
        super().__init__()
        self._asker = asker

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No. Torch would wrap the method below in a function that imports its compiler: seconds, in a client's first request."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, or raises `NotTapeable`."""
        # Indexes give a shape of their own, but for masks.
        sized = torch.Tag.dynamic_output_shape in func.tags and not (
            func is torch.ops.aten.index.Tensor and all(at is None or at.dtype is not torch.bool for at in args[1])
        )
        if sized or torch.Tag.data_dependent_output in func.tags:
            raise _asks(self._asker)
        return func(*args, **(kwargs or {}))


def _asks(func: Any) -> NotTapeable:
    return NotTapeable(f"{func.__name__} asks what a tensor holds, and a tape would never ask again")


class Watch(TorchFunctionMode):
    """Tells a recording what torch is asked for, and gives memory from a pool."""

    def __init__(self, recording: Recording, pool: Pool, gather: int) -> None:
        super().__init__()
        self._recording, self._pool, self._gather = recording, pool, gather

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and takes it down."""
        kwargs = kwargs or {}
        if func in _DESCRIPTIONS:
            return func(*args, **kwargs)
        if func in _READS:
            raise _asks(func)
        if func in _EMPTY:
            return self._pool.empty_like(func(*args, **kwargs))
        with _NoQuestions(func):
            result = func(*args, **kwargs)
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.layout is torch.strided]
        if not isinstance(result, torch.Tensor):
            if func is torch.Tensor.__setitem__:
                self._again(func, args, kwargs)
            several = result if isinstance(result, tuple | list) else ()
            if any(isinstance(one, torch.Tensor) and not _is_view(one, inputs) for one in several):
                raise NotTapeable(f"{func.__name__} gives several new tensors, which no tape keeps")
            return result
        if _is_view(result, inputs):
            if "out" in kwargs or (func.__name__.endswith("_") and not func.__name__.endswith("__")):
                self._again(func, args, kwargs)
            return result
        out = self._pool.empty_like(result)
        out.copy_(result)
        self._take_down(func, *self._held(args, kwargs), self._pool.alias(out))
        return out

    def _held(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments as tapes may hold them: their memory is the next tensors', as in native calls, which know addresses only."""
        return self._pool.alias(args), {name: self._pool.alias(value) for name, value in kwargs.items()}

    def _again(self, func: Any, args: Any, kwargs: Any) -> None:
        """What writes to one of its arguments."""
        given, named = self._held(args, kwargs)
        self._recording.python(lambda: func(*given, **named))

    def _take_down(self, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        """An operation whose result is a tensor of its own."""
        if func is torch.Tensor.index_select and args[1] == 0 and args[0].is_contiguous() and args[2].is_contiguous():
            table, ids = args[0], args[2]
            row_bytes = table[0].numel() * table.element_size()
            self._recording.native(self._gather, (table.data_ptr(), ids.data_ptr(), out.data_ptr(), ids.shape[0], row_bytes))
        elif func in _CONVERSIONS and len(args) == 1:
            self._recording.python(lambda: out.copy_(args[0]))
        else:
            self._recording.python(lambda: out.copy_(func(*args, **kwargs)))


def _is_view(result: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether it lies in the memory of one of them."""
    return any(result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in inputs)


class Listener:
    """Stands in for the library: runs its operations and takes them down.

    Args:
        library: Of the operations.
        names: Their numbers are their places here.
        recording: What takes them down.
    """

    def __init__(self, library: Any, names: Sequence[str], recording: Recording) -> None:
        self._library, self._names, self._recording = library, names, recording

    def __getattr__(self, name: str) -> Callable[..., None]:
        function, number = getattr(self._library, name), self._names.index(name)

        def call(*arguments: int | float | None) -> None:
            self._recording.native(number, arguments)
            function(*arguments)

        return call


def _packed(argument: int | float | None) -> int:
    if isinstance(argument, float):
        return _BITS.unpack(_FLOAT.pack(argument))[0]
    return argument or 0
