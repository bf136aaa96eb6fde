"""The KV cache of a rank, and its pages that leave: for the host's memory, for places behind it, for other replicas."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from importlib.metadata import version

import msgspec
import torch

from penstock.engine.attention.pages import plane_views
from penstock.engine.cache.layout import KVLayer, KVLayout
from penstock.engine.cache.pages import PageGeometry, PageIdentity, kv_dtypes
from penstock.engine.config import EngineConfig
from penstock.engine.connectors.host_pages import HostPages
from penstock.engine.connectors.keepers import keeper_of
from penstock.engine.connectors.lmcache_store import LmcacheStore
from penstock.engine.connectors.mooncake_store import MooncakeStore
from penstock.engine.connectors.moves import Lower, Move, Moved, PageFile
from penstock.engine.connectors.namespace import Namespace, weights_digest
from penstock.engine.connectors.page_files import PageFiles
from penstock.engine.connectors.page_mover import PageMover
from penstock.engine.connectors.page_objects import PageObjects
from penstock.engine.connectors.store_address import store_address
from penstock.engine.connectors.transfer.agent import Agent
from penstock.engine.connectors.transfer.words import Errand, News, Part
from penstock.engine.core.plan import StepPlan
from penstock.engine.loading.loader import Source
from penstock.engine.models.layers.shard import Shard, Stage
from penstock.engine.multimodal.settings import ImageSettings
from penstock.engine.parallel.group import Group
from penstock.engine.quant.kv_scales import KVScales
from penstock.engine.spec.checkpoint import DraftCheckpoint


class KVPages(ABC):
    """A part of every runner, which says what the pages are of."""

    config: EngineConfig
    kv_caches: list[torch.Tensor]
    """Per layer, as of `ForwardContext`; none while they sleep."""
    _group: Group | None
    _shard: Shard
    _stage: Stage
    _layout: KVLayout
    _kv_layers: list[KVLayer]
    _whole_kv_layers: list[KVLayer]
    """What all ranks of tensor parallelism keep together."""
    _same_pages: int
    """Neighbouring ranks, this one included, whose pages have the same bytes: those of one KV head, or of a latent."""
    _drafter: DraftCheckpoint | None
    _source: Source
    """Of the weights."""
    _kv_scales: Sequence[KVScales] | None

    def __init__(self) -> None:
        self._host_pages: HostPages | None = None
        self._movers: dict[Lower, PageMover] = {}
        self._moved: dict[Lower, dict[int, Moved]] = {}
        """Ends of moves of places that have been closed."""
        self._agent: Agent | None = None

    @abstractmethod
    def _zeroed(self, size: int) -> torch.Tensor:
        """So many bytes of the device's memory, uint8, all zero."""

    def kv_layout(self) -> KVLayout:
        """How the layers share the cache's pages."""
        return self._layout

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates the cache, block 0 (the null block) included.

        One page holds a block of all layers of a group, so that a block is one range of bytes wherever it travels; layers see
        strided views.
        """
        self._num_blocks = num_blocks
        layout = self._layout
        pages = self._zeroed(num_blocks * layout.page_bytes).view(num_blocks, layout.num_slots, layout.slot_bytes)
        self._pages = pages
        if self._host_pages is not None:
            self._host_pages.move_to(pages)
        self.kv_caches = [pages[:, 0]] * len(self._kv_layers)
        for group in layout.groups:
            for slot, layer in enumerate(group.layers):
                self.kv_caches[layer] = plane_views(pages[:, slot], self._kv_layers[layer], group.block_size)["kv"]

    def page_keeper(self) -> int:
        """Return the rank that stores, brings and sends this rank's pages; see `keeper_of`."""
        return 0 if self._group is None else keeper_of(self._group.number, self._same_pages, self._group.ranks)

    def initialize_offload(self, num_pages: int) -> None:
        """Allocates the host's memory for so many pages."""
        transfer, group = self.config.transfer, self._group
        lends = transfer is not None and transfer.lends
        if group is None or self._same_pages == 1:
            self._host_pages = HostPages(self._pages, num_pages, shared=lends)
        else:
            memory = group.page_memory[self.page_keeper() % group.ranks]
            self._host_pages = HostPages(self._pages, num_pages, memory=memory, stores=self._keeps_pages)

    def _ranks_here(self) -> tuple[int, int]:
        """How many ranks there are on this node, and how many of them keep pages."""
        if (group := self._group) is None:
            return 1, 1
        first = group.number - group.number % group.ranks
        ranks = range(first, first + group.ranks)
        return len(ranks), len({keeper_of(rank, self._same_pages, group.ranks) for rank in ranks})

    @property
    def _keeps_pages(self) -> bool:
        return self._group is None or self.page_keeper() == self._group.number

    def open_lower(self, name: Lower) -> list[PageFile]:
        """Opens the place of pages of these weights."""
        cache = self.config.cache
        assert self._host_pages is not None, "there are no tiers"
        if not self._keeps_pages:
            return []
        if (mover := self._movers.pop(name, None)) is not None:
            mover.close()
            self._moved[name] = self._moved.get(name, {}) | mover.take()
        namespace, slots = self._namespace(), self._host_pages.slots
        if name == "disk":
            assert cache.disk_folder is not None, "there is no disk tier"
            files = PageFiles(cache.disk_folder, namespace, slots, cache.disk_bytes, *self._ranks_here())
            self._movers[name] = files
            return files.found
        if name == "store":
            assert cache.store is not None, "there is no shared store"
            address = store_address(cache.store)
            store = MooncakeStore if address.kind == "mooncake" else LmcacheStore
            self._movers[name] = store(address, namespace, slots)
            return []
        assert cache.bucket is not None, "there is no object store"
        self._movers[name] = PageObjects(cache.bucket, namespace, slots)
        return []

    def _namespace(self) -> Namespace:
        model, cache, source = self.config.model, self.config.cache, self._source
        commits = [weights_digest(source.path)] + ([] if self._drafter is None else [weights_digest(self._drafter.path)])
        return Namespace(
            version=version("penstock"),
            hash_seed=cache.hash_seed,
            identity=PageIdentity(
                commit=" ".join([*commits, *(["made up"] if source.format == "dummy" else [])]),
                quantization=model.quantization or "",
                kv_dtypes=kv_dtypes(self._kv_layers),
                scales="" if self._kv_scales is None else hashlib.sha256(repr(self._kv_scales).encode()).hexdigest(),
                images=_seen_as(model.images, None if self._drafter is None else self._drafter.images),
            ),
            geometry=PageGeometry(
                layers=tuple(self._kv_layers),
                layout=self._layout,
                part=self._shard.rank // self._same_pages,
                parts=self._shard.world // self._same_pages,
            ),
        )

    def move_pages(self, name: Lower, moves: list[Move]) -> None:
        """Begins to move pages; without a place none of them comes to anything."""
        if not self._keeps_pages:
            return
        if (mover := self._movers.get(name)) is None:
            lost = {move.number: Moved(0.0, "the folder could not be opened") for move in moves}
            self._moved[name] = self._moved.get(name, {}) | lost
        else:
            mover.begin(moves)

    def take_moved(self, name: Lower) -> dict[int, Moved]:
        """Moves that have ended since the last call."""
        mover = self._movers.get(name)
        return self._moved.pop(name, {}) | ({} if mover is None else mover.take())

    def open_transfer(self, engine_id: str) -> Part:
        """Begins to lend and read pages of these weights, under the engine's id; returns what this rank has of each page."""
        config, number = self.config.transfer, 0 if self._group is None else self._group.number
        assert config is not None and self._host_pages is not None, "there is nothing to transfer"
        space, of = self._namespace(), self._shard.world // self._same_pages
        layout = KVLayout(self._layout.groups, 0)
        whole = msgspec.structs.replace(space, geometry=PageGeometry(layers=tuple(self._whole_kv_layers), layout=layout))
        place = self._stage.rank, self._stage.world, space.geometry.part, of
        part = Part(*place, whole.name, config.host, self._keeps_pages)
        if not self._keeps_pages:
            return part
        if self._agent is None:
            config, first = msgspec.structs.replace(config, engine_id=engine_id), number % self._same_pages == 0
            self._agent = Agent(config, part, space.geometry, self._host_pages, number, lends=config.lends and first)
        else:
            self._agent.rename(part.name)
        return part

    def run_errands(self, errands: list[Errand]) -> None:
        """Does what is asked about pages at other replicas, where this rank keeps pages."""
        assert self._agent is not None or not self._keeps_pages, "no pages are lent or read"
        if self._agent is not None:
            self._agent.run(errands)

    def take_news(self) -> News:
        """What has become of pages at other replicas since the last call."""
        assert self._agent is not None or not self._keeps_pages, "no pages are lent or read"
        return News({}, [], []) if self._agent is None else self._agent.take()

    def _copies(self, plan: StepPlan) -> Future[tuple[float, float]] | None:
        """Begins to copy what the plan says, and gives the seconds that stores and loads have taken; None: nothing is copied."""
        if plan.transfers is None:
            return None
        assert self._host_pages is not None, "pages are copied, and there is no place for them"
        return self._host_pages.begin(plan.transfers)

    def _drop_pages(self) -> None:
        """Gives the cache's memory back; what the host's memory holds stays there."""
        self.kv_caches = []
        self._pages = torch.empty(0)
        if self._host_pages is not None:
            self._host_pages.move_to(self._pages)


def _seen_as(*images: ImageSettings | None) -> str:
    """How models have images prepared, in the words of `PageIdentity`."""
    return " ".join(msgspec.json.encode((one.resize, one.normalization)).decode() for one in images if one is not None)
