"""One request that waits at the gateway."""

_OF_ADAPTER = "#"
"""Separates model and adapter. No Kubernetes name contains it."""


def queue_name(model: str, adapter: str | None = None) -> str:
    """The queue of a model, or of the requests for one of its adapters as long as no replica has it."""
    return model if adapter is None else f"{model}{_OF_ADAPTER}{adapter}"


def model_of(queue: str) -> str:
    """Return the model of a queue."""
    return queue.partition(_OF_ADAPTER)[0]


class Ticket:
    """A place in the queue. Tickets are compared by identity.

    Args:
        model: Where it waits: `queue_name`, a model's `Model.id`.
        tenant: Whose request it is.
        priority: Band; smaller goes first.
        weight: Share of the tenant in comparison with the others of its band, above 0.
        tokens: What it will cost; the gateway's best knowledge of its prompt.
        size: Bytes that it keeps in memory.
        until: When waiting ends; monotonic seconds.
        ordinal: Order of arrival.
    """

    __slots__ = ("model", "ordinal", "priority", "size", "tenant", "tokens", "until", "weight")

    def __init__(
        self,
        *,
        model: str,
        tenant: str = "",
        priority: int = 0,
        weight: float = 1.0,
        tokens: int = 1,
        size: int = 0,
        until: float,
        ordinal: int,
    ) -> None:
        self.model = model
        self.tenant = tenant
        self.priority = priority
        self.weight = weight
        self.tokens = tokens
        self.size = size
        self.until = until
        self.ordinal = ordinal

    @property
    def key(self) -> tuple[float, int]:
        """Order within a tenant: the earliest deadline first, then the first that came. Without deadlines of their own, requests
        for one model have the deadlines of their arrival."""
        return (self.until, self.ordinal)
