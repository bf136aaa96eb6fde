"""One request on its way through the stages of the director."""

from penstock.api.fleet import Model
from penstock.gateway.extproc.body import Body
from penstock.gateway.extproc.call import Call
from penstock.gateway.load.tokenized import TokenizedPrompts
from penstock.gateway.picker.subset import Subset
from penstock.gateway.tenants.tenant import Tenant

MOST_ANSWERS = 1024
"""Answers to a prompt that are counted: more than a batch of any replica, and than its engine allows. A client may write any
number, whose request would fill a replica as long as nobody has refused it."""


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
        "guess",
        "identified",
        "model",
        "name",
        "path",
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
    """Set by `identify`: the request id in bookings and events."""
    tenant: Tenant
    """Set by `identify`: the tenant."""
    identified: bool
    """Whether `identify` has found its tenant."""
    conceals: bool
    """Set by `identify`: whether replicas must not see the client's key."""
    body: Body
    """Set by `read`."""
    guess: int
    """Set with `body`: about how many tokens the prompt has."""
    model: Model
    """Set by `resolve`, again after a change of the fleet."""
    adapter: str | None
    """Set by `resolve`: the LoRA adapter that the name means. None: the model itself."""
    resolved: bool
    """Whether `resolve` has found a model."""
    name: str
    """Set by `resolve`: the name that the engines use for what serves the request: a model, a canary or an adapter."""
    renamed: str | None
    """Set by `resolve`: the name that the body must have instead, if those engines do not know the client's name."""
    subset: Subset | None
    """Set by `resolve`: the replicas left by the gateway's subset and the request's InferencePool. None: all of the model's."""
    priority: int
    """Set by the director: the request's priority. A smaller number goes first."""
    patience_s: float | None
    """Set by `admit`: how long after `came` the client waits, if it says so."""
    charged: int
    """Set by `admit`: tokens charged to the tenant in the queue. 0 if the request did not wait."""
    entered: Model | None
    """Set by `admit`: the model whose capacity the request holds until it is booked. None if it holds none."""
    tokens: TokenizedPrompts
    """Set by `tokenise`."""

    def __init__(self, call: Call, came: float) -> None:
        self.call, self.path = call, call.path
        self.identified = self.resolved = False
        self.came = came

    @property
    def finishes(self) -> int:
        """How many ends its engine will tell: one for each answer to each prompt."""
        n = self.body.fields.get("n")
        return len(self.tokens.prompts) * (min(n, MOST_ANSWERS) if type(n) is int and n > 0 else 1)

    @property
    def band(self) -> int:
        """What it goes by at the gateway, where models share the room for waiting: `priority` and its model's."""
        return self.priority + self.model.priority
