"""What a Gluon kernel for Hopper uses, on a CPU: runs the kernel's own source, and fails where a GPU would hang or race.

- Shared memory is NaN until something is written, and from the moment that a copy is asked for until that copy has arrived.
- A copy arrives as late as it can (nobody can go on without it) or at once, as the schedule has it.
- A barrier counts arrivals and bytes; a wait ends when the phase of the other parity is the one under way.
- An asynchronous product has no value before it is waited for; its operands must be the same then as when it began, and those in
  registers must be kept until then.
- Partitions are threads of which one runs at a time, and another may go on wherever one touches a barrier. If none can and no
  copy is on its way, that is a deadlock.
"""

import random
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

TIMEOUT_S = 60.0


class Hazard(Exception):
    """What a GPU would not tell: a hang, a race, or bytes that a barrier does not count."""


class Pointer:
    """Elements of a tensor from a place on."""

    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self.flat, self.at = flat, at

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.flat, self.at + more)


class Number(int):
    """A scalar."""

    def to(self, _dtype: torch.dtype) -> "Number":
        return self


def pointer(tensor: torch.Tensor) -> Pointer:
    """To a tensor's first element."""
    return Pointer(tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset(),), (1,)))


class Shared:
    """A part of shared memory, in the order in which a matrix of rows of 128 bytes lies: wider ones in columns of 64 elements."""

    def __init__(self, machine: "Machine", memory: torch.Tensor, shape: Sequence[int], layout: Any = None) -> None:
        self.machine, self.memory, self.shape = machine, memory, list(shape)
        self.layout = layout
        self.transposed = False

    def index(self, at: int) -> "Shared":
        if not 0 <= at < self.shape[0]:
            raise Hazard(f"slot {at} of {self.shape[0]}")
        size = self.memory.numel() // self.shape[0]
        return Shared(self.machine, self.memory[at * size : (at + 1) * size], self.shape[1:])

    def _reinterpret(self, _dtype: Any, shape: Sequence[int], _layout: Any) -> "Shared":
        return Shared(self.machine, self.memory, shape)

    def permute(self, order: Sequence[int]) -> "Shared":
        assert tuple(order) == (1, 0)
        other = Shared(self.machine, self.memory, self.shape)
        other.transposed = not self.transposed
        return other

    def matrix(self) -> torch.Tensor:
        rows, width = self.shape[-2:]
        found = self.memory.view(width // 64, rows, 64).transpose(0, 1).reshape(rows, width)
        return found.T if self.transposed else found

    def load(self, _layout: Any) -> torch.Tensor:
        return self.matrix().clone()

    def store(self, value: torch.Tensor) -> None:
        rows, width = self.shape
        self.memory.view(width // 64, rows, 64).copy_(value.view(rows, width // 64, 64).transpose(0, 1))
        self.machine.unfenced.setdefault(threading.get_ident(), set()).add(self.memory.data_ptr())


class Barrier:
    """One of shared memory."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phases = 0

    def settle(self) -> None:
        if self.left < 0:
            raise Hazard("more arrivals than a barrier counts")
        if self.left == 0 and self.bytes == 0:
            self.left, self.phases = self.count, self.phases + 1


class Barriers:
    """An array of them."""

    def __init__(self, count: int) -> None:
        self.of = [Barrier() for _ in range(count)]

    def index(self, at: int) -> Barrier:
        return self.of[at]


class Product:
    """One that may be under way."""

    def __init__(self, a: Any, b: Any, acc: Any) -> None:
        self.operands, self.acc, self.waited = (a, b), acc, False
        self.began = [self._now(it) for it in self.operands]

    @staticmethod
    def _now(operand: Any) -> torch.Tensor:
        return (operand.matrix() if isinstance(operand, Shared) else operand).clone()

    def value(self, kept: Sequence[Any]) -> torch.Tensor:
        for operand, began in zip(self.operands, self.began, strict=True):
            if not torch.equal(self._now(operand).nan_to_num(7.0), began.nan_to_num(7.0)):
                raise Hazard("an operand changed under a product")
            if isinstance(operand, torch.Tensor) and not any(operand is it for it in kept):
                raise Hazard("an operand in registers was not kept until its product was waited for")
        a, b = (it.float() for it in self.began)
        self.waited = True
        return a @ b if self.acc is None else self.acc + a @ b


class Machine:
    """One program of a grid; copies arrive late, or at once with `eager`; `seed` orders the partitions."""

    def __init__(self, place: tuple[int, int], grid: tuple[int, int], seed: int, eager: bool) -> None:
        self.place, self.grid, self.eager, self.random = place, grid, eager, random.Random(seed)
        self.copies: list[Callable[[], None]] = []
        self.unfenced: dict[int, set[int]] = {}
        self.flights: dict[int, list[Product]] = {}
        self.turn = threading.Condition()
        self.running: int | None = None
        self.order: list[int] = []
        self.ready: dict[int, Callable[[], bool]] = {}
        self.failed: BaseException | None = None

    # Partitions

    def _next(self) -> None:
        """Gives the turn to a partition that can go on; copies arrive until one can."""
        while self.ready:
            if self.eager:
                self._land(all_of_them=True)
            # In the partitions' order: a schedule is the same in each run, however the threads began.
            able = sorted((number for number, can in self.ready.items() if can()), key=self.order.index)
            if able:
                self.running = self.random.choice(able)
                self.turn.notify_all()
                return
            if not self.copies:
                raise Hazard(f"a deadlock of {len(self.ready)} partitions")
            self._land(all_of_them=False)

    def _land(self, all_of_them: bool) -> None:
        while self.copies:
            self.copies.pop(self.random.randrange(len(self.copies)))()
            if not all_of_them:
                return

    def pause(self, can: Callable[[], bool] = lambda: True) -> None:
        """Lets others go on, and goes on when it has its turn and can."""
        number = threading.get_ident()
        with self.turn:
            self.ready[number] = can
            self._next()
            while self.running != number and self.failed is None:
                if not self.turn.wait(TIMEOUT_S):
                    raise Hazard("the stand-in itself hangs")
            if self.failed is not None:
                raise Hazard("another partition failed")
            del self.ready[number]

    def specialize(self, partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_sizes: Any) -> None:
        barrier, started = threading.Barrier(len(partitions)), threading.Event()

        def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            number = threading.get_ident()
            try:
                with self.turn:
                    self.ready[number] = lambda: True
                barrier.wait(TIMEOUT_S)
                started.wait(TIMEOUT_S)
                with self.turn:
                    if self.running is None:
                        self._next()
                    while self.running != number and self.failed is None:
                        self.turn.wait(TIMEOUT_S)
                    self.ready.pop(number, None)
                if self.failed is None:
                    function(*arguments)
                with self.turn:
                    if self.flights.get(number):
                        raise Hazard("a partition ends with a product under way")
                    self._next()
            except BaseException as error:  # noqa: BLE001 (told to the test)
                with self.turn:
                    self.failed = self.failed or error
                    self.turn.notify_all()

        threads = [threading.Thread(target=run, args=it, daemon=True) for it in partitions]
        for thread in threads:
            thread.start()
            assert thread.ident is not None
            self.order.append(thread.ident)
        started.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
        if self.failed is not None:
            raise self.failed
        if self.copies:
            raise Hazard("a program ends with a copy on its way")

    # Operations

    def copy(self, tensor: torch.Tensor, coordinates: Sequence[int], barrier: Barrier, result: Shared) -> None:
        result.memory.fill_(float("nan"))

        def land() -> None:
            found, inside = torch.zeros(result.shape, dtype=tensor.dtype), True
            source, target = [], []
            for begin, size, length in zip(coordinates, result.shape, tensor.shape, strict=True):
                low, high = max(begin, 0), min(begin + size, length)
                inside = inside and low < high
                source.append(slice(low, high))
                target.append(slice(low - begin, high - begin))
            if inside:
                found[tuple(target)] = tensor[tuple(source)]
            result.memory.copy_(found.flatten())
            barrier.bytes -= result.memory.nbytes
            barrier.settle()

        self.copies.append(land)

    def multiply(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        dirty = {it for of in self.unfenced.values() for it in of}
        if any(isinstance(it, Shared) and it.memory.data_ptr() in dirty for it in (a, b)):
            raise Hazard("a product reads what was stored without a fence")
        product = Product(a, b, acc if use_acc else None)
        self.flights.setdefault(threading.get_ident(), []).append(product)
        return product

    def wait_for_products(self, left: int, deps: Sequence[Any]) -> Any:
        flights = self.flights[threading.get_ident()]
        done = [flights.pop(0) for _ in range(max(0, len(flights) - left))]
        values = {id(it): it.value(deps) for it in done}
        found = tuple(values.get(id(it), it) for it in deps)
        return found[0] if len(found) == 1 else found

    def fence(self) -> None:
        self.unfenced.pop(threading.get_ident(), None)

    def arrive(self, barrier: Barrier, count: int) -> None:
        barrier.left -= count
        barrier.settle()
        self.pause()

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.bytes += size
        barrier.left -= 1
        barrier.settle()

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.pause(lambda: barrier.phases % 2 != parity)

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def namespace(self) -> dict[str, Any]:
        """The names that a kernel imports."""
        mbarrier = SimpleNamespace(
            init=self.init, arrive=self.arrive, expect=self.expect, wait=self.wait, MBarrierLayout=lambda: None
        )
        return {
            "gl": self._language(),
            "tl": self._language(),
            "mbarrier": mbarrier,
            "tma": SimpleNamespace(async_copy_global_to_shared=lambda kv, at, bar, to: self.copy(kv.tensor, at, bar, to)),
            "fence_async_shared": self.fence,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": lambda left, deps: self.wait_for_products(left, deps),
        }

    def _language(self) -> SimpleNamespace:
        def load(at: Pointer, mask: Any = True, other: Any = 0) -> Any:
            if not isinstance(at.at, torch.Tensor):
                return Number(at.flat[int(at.at)].item()) if mask else Number(other)
            mask = torch.as_tensor(mask).expand(at.at.shape)
            return torch.where(mask, at.flat[torch.where(mask, at.at, 0)], torch.tensor(other, dtype=at.flat.dtype))

        def store(at: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
            at.flat[at.at[mask]] = value[mask]

        def where(mask: Any, yes: Any, no: Any) -> Any:
            return torch.where(mask, yes, no) if isinstance(mask, torch.Tensor) else yes if mask else no

        def allocate(dtype: Any, shape: Sequence[int], _layout: Any) -> Any:
            if dtype is torch.int64:
                return Barriers(shape[0])
            return Shared(self, torch.full(tuple(shape), float("nan"), dtype=dtype).flatten(), shape)

        layouts = ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "NVMMASharedLayout", "BlockedLayout")
        return SimpleNamespace(
            **dict.fromkeys(layouts, lambda *_: None),
            bfloat16=torch.bfloat16, float32=torch.float32, int32=torch.int32, int64=torch.int64, constexpr=int,
            load=load, store=store, where=where, allocate_shared_memory=allocate, warp_specialize=self.specialize,
            program_id=lambda axis: self.place[axis], num_programs=lambda axis: self.grid[axis],
            arange=lambda low, high, _=None: torch.arange(low, high),
            full=lambda shape, value, dtype, _=None: torch.full(tuple(shape), value, dtype=dtype),
            convert_layout=lambda x, _: x, static_range=range, cdiv=lambda a, b: -(-a // b), minimum=min,
            maximum=torch.maximum, max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2,
            inline_asm_elementwise=lambda _asm, _of, arguments, **_: arguments[0],
        )  # fmt: skip


def bound(functions: dict[str, FunctionType], constants: dict[str, Any], machine: Machine) -> dict[str, FunctionType]:
    """Functions of a kernel's source with the stand-in's names in place of Gluon's."""
    names: dict[str, Any] = {**constants, **machine.namespace(), "__builtins__": __builtins__}
    for name, function in functions.items():
        names[name] = FunctionType(function.__code__, names, name, function.__defaults__)
    return names
