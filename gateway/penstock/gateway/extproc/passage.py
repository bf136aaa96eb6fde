"""One request on its way through the stages of the director."""

from penstock.api.fleet import Model
from penstock.gateway.extproc.body import Body
from penstock.gateway.extproc.call import Call
from penstock.gateway.load.tokenized import TokenizedPrompts
from penstock.gateway.picker.subset import Subset
from penstock.gateway.tenants.tenant import Tenant


class Passage:
    """What is known of a request so far. Each stage reads what those before it have found, and adds its own.

    Args:
        call: The request as it came.
        came: When its body was complete; monotonic seconds.
    """

    __slots__ = (
        "adapter",
        "body",
        "call",
        "came",
        "charged",
        "conceals",
        "entered",
        "identified",
        "model",
        "name",
        "patience_s",
        "priority",
        "renamed",
        "request_id",
        "resolved",
        "subset",
        "tenant",
        "tokens",
    )

    request_id: str
    """By `identify`: as bookings and events know it."""
    tenant: Tenant
    """By `identify`: whose it is."""
    identified: bool
    """Whether `identify` has found its tenant."""
    conceals: bool
    """By `identify`: whether replicas must not see the client's key."""
    body: Body
    """By `read`."""
    model: Model
    """By `resolve`, again when the fleet has changed."""
    adapter: str | None
    """By `resolve`: the LoRA adapter that the name means; None for the model itself."""
    resolved: bool
    """Whether `resolve` has found a model."""
    name: str
    """By `resolve`: what serves the request, as its engines call it: a model, a canary, an adapter."""
    renamed: str | None
    """By `resolve`: what the body must say instead, where those engines do not know the name that the client used."""
    subset: Subset | None
    """By `resolve`: the replicas that the gateway's hint and the request's InferencePool leave; None: all of the model's."""
    priority: int
    """By the director: what it goes by; smaller goes first."""
    patience_s: float | None
    """By `admit`: how long after `came` the client waits, where it says so."""
    charged: int
    """By `admit`: tokens that its tenant was charged for in the queue; 0 where it did not wait."""
    entered: Model | None
    """By `admit`: whose room it takes until it is booked; None where it waits for nobody."""
    tokens: TokenizedPrompts
    """By `tokenise`."""

    def __init__(self, call: Call, came: float) -> None:
        self.call = call
        self.identified = self.resolved = False
        self.came = came

    @property
    def finishes(self) -> int:
        """How many ends its engine will tell: one for each answer to each prompt."""
        n = self.body.fields.get("n")
        return len(self.tokens.prompts) * (n if type(n) is int and n > 0 else 1)

    @property
    def band(self) -> int:
        """What it goes by at the gateway, where models share the room for waiting: `priority` and its model's."""
        return self.priority + self.model.priority
