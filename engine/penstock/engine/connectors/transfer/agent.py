"""A rank's half of the transfer: it lends pages, reads pages, or both."""

from penstock.engine.cache.pages import PageGeometry
from penstock.engine.config import TransferConfig, TransportName
from penstock.engine.connectors.host_pages import HostPages
from penstock.engine.connectors.shared_slots import SharedSlots
from penstock.engine.connectors.transfer.lender import Lender
from penstock.engine.connectors.transfer.nixl import NixlInlet, NixlOutlet
from penstock.engine.connectors.transfer.reader import Reader
from penstock.engine.connectors.transfer.secret_file import read_secret
from penstock.engine.connectors.transfer.shared_memory import SharedMemoryInlet, SharedMemoryOutlet
from penstock.engine.connectors.transfer.transport import Inlet, Outlet, TcpInlet, TcpOutlet
from penstock.engine.connectors.transfer.words import Errand, News, Part


class Agent:
    """Carries out errands.

    Args:
        config: The replica's.
        part: Of pages that this rank has.
        geometry: Of that part.
        pages: The host's memory; shared where the rank lends.
        rank: Its number among those of all pipeline stages.
        lends: Whether it does: of those with the same part, the first one. The others may be on other nodes.

    Raises:
        ConfigError: The secret cannot be read, the port is taken, or a transport is not there.
    """

    def __init__(
        self, config: TransferConfig, part: Part, geometry: PageGeometry, pages: HostPages, rank: int, *, lends: bool
    ) -> None:
        secret = read_secret(config.secret)
        self._reader = None
        if config.reads:
            self._reader = Reader(secret, part, geometry, pages.slots, inlets(config, secret, rank))
        self._lender = None
        if lends:
            assert pages.shared is not None, "this replica lends pages of its own memory alone"
            ways, port = outlets(config, pages.shared, secret, rank), config.port + part.stage * part.of + part.number
            address = config.host, port
            self._lender = Lender(address, secret, config.engine_id, part.name, pages.slots, ways, geometry)

    def run(self, errands: list[Errand]) -> None:
        """Does or begins each of them."""
        for errand in errands:
            if errand.action in ("grant", "revoke"):
                if self._lender is None:
                    continue  # another rank lends this part
                if errand.action == "grant":
                    self._lender.grant(errand.lease, errand.pages)
                else:
                    self._lender.revoke(errand.lease)
            else:
                assert self._reader is not None, "this replica reads no pages"
                (self._reader.pull if errand.action == "pull" else self._reader.tell)(errand)

    def take(self) -> News:
        """What has happened since the last call."""
        released, renewed = ([], []) if self._lender is None else self._lender.take()
        return News({} if self._reader is None else self._reader.take(), released, renewed)

    def rename(self, fingerprint: str) -> None:
        """The weights are other ones."""
        for half in (self._lender, self._reader):
            if half is not None:
                half.rename(fingerprint)


def outlets(config: TransferConfig, slots: SharedSlots, secret: bytes, rank: int) -> dict[TransportName, Outlet]:
    """Return the lender's half of each transport of the configuration; `ConfigError` for one that this machine lacks."""
    made: dict[TransportName, Outlet] = {}
    for name in config.transports:
        match name:
            case "tcp":
                made[name] = TcpOutlet(slots.array)
            case "shm":
                made[name] = SharedMemoryOutlet(slots, secret)
            case "nixl":
                made[name] = NixlOutlet(f"{config.engine_id}-{rank}-lends", slots.array)
    return made


def inlets(config: TransferConfig, secret: bytes, rank: int) -> dict[TransportName, Inlet]:
    """Return the reader's half of each transport of the configuration, in its order; `ConfigError` as for `outlets`."""
    made: dict[TransportName, Inlet] = {}
    for name in config.transports:
        match name:
            case "tcp":
                made[name] = TcpInlet()
            case "shm":
                made[name] = SharedMemoryInlet(secret)
            case "nixl":
                made[name] = NixlInlet(f"{config.engine_id}-{rank}-reads")
    return made
