"""Adapters on one rank: those in the host's memory, and those on the shelves of the model's linear layers.

Which adapter is where is the scheduler's to decide; it says so in plans. Files are read in a thread of their own, beside the
steps.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from penstock.engine.config import ConfigError, LoraConfig
from penstock.engine.core.executor import AdapterRead
from penstock.engine.core.plan import StepPlan
from penstock.engine.loading.checkpoint import resolve
from penstock.engine.lora.checkpoint import Factors, HostAdapter, Target, digest, read_adapter
from penstock.engine.lora.linear import LoraLinearMethod, Shelf
from penstock.engine.lora.peft import MODULES
from penstock.engine.models.layers.linear_method import LinearMethod, LinearMethodFactory
from penstock.engine.models.layers.projection import LinearLayer
from penstock.engine.models.layers.weight import LinearPart, Weights
from penstock.kernels.lora.batch import LoraBatch
from penstock.kernels.lora.device import DeviceLoraBatch
from penstock.kernels.ops import Ops

log = logging.getLogger(__name__)

NO_SLOT = -1


class Adaptable(Protocol):
    """A model that says which tensors it takes."""

    def weights(self) -> Weights:
        """Every tensor, by name."""
        ...


class NoLora:
    """Of an engine that serves no adapters: nothing is wrapped, nothing is done."""

    dummy_slot = NO_SLOT

    def wrap(self, method: LinearMethodFactory, ops: Ops) -> LinearMethodFactory:
        """The same."""
        return method

    def attach(self, model: Adaptable, whole: Callable[[], Adaptable]) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""

    def apply(self, plan: StepPlan) -> None:
        """Do nothing."""

    def is_used(self, plan: StepPlan) -> bool:
        """No."""
        return False

    def reset(self) -> None:
        """Do nothing."""


class LoraRunner:
    """See the module.

    Args:
        config: How many adapters, and of which rank.
        max_num_seqs: Rows.
        max_num_tokens: Of a step.
    """

    dummy_slot = 0
    """What measurements of memory run with."""

    def __init__(self, config: LoraConfig, max_num_seqs: int, max_num_tokens: int) -> None:
        self._config = config
        self._batch = LoraBatch(config.max_loras, max_num_tokens)
        self._row_slots = np.full(max_num_seqs, NO_SLOT, np.int32)
        self._targets: dict[str, Target] = {}
        self._shelves: dict[str, Shelf] = {}
        self._lock = threading.Lock()
        self._host: dict[int, HostAdapter] = {}
        self._reads: dict[int, AdapterRead] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lora", initializer=_one_thread)

    # --- the model ---

    def wrap(self, method: LinearMethodFactory, ops: Ops) -> LinearMethodFactory:
        """Makes linear layers that adapters can be added to."""

        def make(layer: LinearLayer) -> LinearMethod:
            if layer.bare:
                return method(layer)
            return LoraLinearMethod(method(layer), layer, ops, self._step_batch())

        return make

    def attach(self, model: Adaptable, whole: Callable[[], Adaptable]) -> None:
        """Makes room in a new model; nothing is in any slot then.

        Args:
            model: Of the rank.
            whole: The same with the layers of all pipeline stages, which is asked what adapters may be on and nothing else.
        """
        self._shelves = {}
        own, modules, parts = (
            _adaptable(model),
            dict[LoraLinearMethod, list[str]](),
            dict[LoraLinearMethod, list[tuple[int, int]]](),
        )
        self._targets = {module: Target(part.shape, part.narrow, module in own) for module, part in _adaptable(whole()).items()}
        for module, part in own.items():
            method = part.method
            assert isinstance(method, LoraLinearMethod), f"{module} was built without room for adapters"
            modules.setdefault(method, []).append(module)
            parts.setdefault(method, []).append((part.offset, part.size))
        for method, names in modules.items():
            shelves = method.shelve(self._config.max_loras, self._config.max_lora_rank, parts[method])
            self._shelves |= zip(names, shelves, strict=True)
        size = sum(shelf.nbytes for shelf in self._shelves.values())
        log.info("LoRA: %d slots of rank %d take %s bytes", self._config.max_loras, self._config.max_lora_rank, f"{size:,}")

    def detach(self) -> None:
        """Lets go of the model, which is to be freed; adapters are read on."""
        self._shelves = {}

    # --- the step ---

    def apply(self, plan: StepPlan) -> None:
        """Brings slots and rows to where `plan` runs."""
        self._load_slots(plan)
        self._take_in(plan)
        self._batch.fill(np.repeat(self._row_slots[plan.rows], plan.num_new_tokens))

    def is_used(self, plan: StepPlan) -> bool:
        """Whether a request of a plan that has been applied has an adapter."""
        return bool((self._row_slots[plan.rows] != NO_SLOT).any())

    def _take_in(self, plan: StepPlan) -> None:
        """Learns of rows that come and go."""
        self._row_slots[plan.released] = NO_SLOT
        for admission in plan.admissions:
            self._row_slots[admission.row] = admission.lora_slot

    def reset(self) -> None:
        """No row has an adapter."""
        self._row_slots[:] = NO_SLOT
        self._batch.clear()

    def _step_batch(self) -> LoraBatch | DeviceLoraBatch:
        return self._batch

    def _load_slots(self, plan: StepPlan) -> None:
        for load in plan.lora_loads:
            with self._lock:
                adapter = self._host[load.copy]
            for module, shelf in self._shelves.items():
                if module in adapter:
                    shelf.put(load.slot, *adapter[module])
                else:
                    shelf.clear(load.slot)
        self.drop_adapters(plan.lora_drops)

    # --- the host's memory ---

    def read_adapter(self, copy: int, uri: str, revision: str | None) -> None:
        """Begins to read an adapter, to be known by the number `copy`; `take_reads` tells its end. Safe beside a step."""
        self._thread.submit(self._read, copy, uri, revision)

    def take_reads(self) -> dict[int, AdapterRead]:
        """Adapters that have been read since the last call, each with how that ended. Safe beside a step."""
        with self._lock:
            reads, self._reads = self._reads, {}
        return reads

    def drop_adapters(self, copies: Sequence[int]) -> None:
        """Forgets adapters in the host's memory; slots keep what they hold."""
        with self._lock:
            for copy in copies:
                self._host.pop(copy, None)

    def _kept(self, adapter: HostAdapter) -> HostAdapter:
        """In the form in which it waits for a slot."""
        return adapter

    def _read(self, copy: int, uri: str, revision: str | None) -> None:
        kept = None
        try:
            folder = resolve(uri, revision, what="adapter")
            adapter = read_adapter(folder, self._targets, self._config.max_lora_rank)
            kept, read = self._kept(adapter), AdapterRead(digest=digest(adapter))
        except ConfigError as refusal:
            read = AdapterRead(str(refusal))
        except Exception as failure:  # whatever a strange file leads to is that adapter's alone
            log.exception("adapter %s could not be read", uri)
            read = AdapterRead(f"{uri} cannot be read: {type(failure).__name__}: {failure}")
        with self._lock:
            if kept is not None:
                self._host[copy] = kept
            self._reads[copy] = read


class DeviceLoraRunner(LoraRunner):
    """On a device, where the step itself finds each token's slot by its row's.

    Args:
        config: See LoraRunner.
        max_num_seqs: See LoraRunner.
        batch: What steps fill.
        pinned: Memory of the host that the device reads by itself, by shape and `dtype`.
    """

    def __init__(
        self, config: LoraConfig, max_num_seqs: int, batch: DeviceLoraBatch, pinned: Callable[..., torch.Tensor]
    ) -> None:
        super().__init__(config, max_num_seqs, max_num_tokens=0)  # the step fills the device's own batch
        self._device_batch, self._pinned = batch, pinned

    def attach(self, model: Adaptable, whole: Callable[[], Adaptable]) -> None:
        """Makes room in a new model; arguments as of `LoraRunner.attach`."""
        super().attach(model, whole)
        self._dtype = next(iter(self._shelves.values())).a.dtype

    def apply(self, plan: StepPlan) -> None:
        """Brings slots to where `plan` runs."""
        self._load_slots(plan)
        self._take_in(plan)

    def reset(self) -> None:
        """No token has an adapter."""
        self._row_slots[:] = NO_SLOT
        self._device_batch.token_slots.fill_(NO_SLOT)

    def _step_batch(self) -> DeviceLoraBatch:
        return self._device_batch

    def _kept(self, adapter: HostAdapter) -> HostAdapter:
        """In pinned memory and the model's dtype: the step that brings it into a slot launches copies, and waits for none. Who
        gives the memory out sees to it that nobody gets it before they are over."""
        values = [value for factors in adapter.values() for value in factors]
        parts = self._pinned(sum(value.numel() for value in values), dtype=self._dtype).split([value.numel() for value in values])
        placed = [part.view(value.shape).copy_(value) for part, value in zip(parts, values, strict=True)]
        return {module: Factors(*placed[2 * at : 2 * at + 2]) for at, module in enumerate(adapter)}


def lora_runner(config: LoraConfig | None, max_num_seqs: int, max_num_tokens: int) -> Any:
    """What a rank on a CPU does about adapters."""
    return NoLora() if config is None else LoraRunner(config, max_num_seqs, max_num_tokens)


def device_lora_runner(
    config: LoraConfig | None, max_num_seqs: int, batch: DeviceLoraBatch, pinned: Callable[..., torch.Tensor]
) -> Any:
    """What a rank on a device does about them; see `DeviceLoraRunner`."""
    return NoLora() if config is None else DeviceLoraRunner(config, max_num_seqs, batch, pinned)


def _adaptable(model: Adaptable) -> dict[str, LinearPart]:
    """What adapters may be on, by module."""
    named = [(name.rpartition(".")[0], weight.part) for name, weight in model.weights().items()]
    return {module: part for module, part in named if part is not None and module.rpartition(".")[2] in MODULES}


def _one_thread() -> None:
    # The steps have the cores.
    torch.set_num_threads(1)
