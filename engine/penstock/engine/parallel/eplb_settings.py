"""`--enable-eplb` and `--eplb-config`, which has vLLM's keys."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from penstock.engine.config import ConfigError, EplbConfig
from penstock.plain_errors import explained

_FIXED: Final[Mapping[str, tuple[object, str]]] = {
    "use_async": (True, "experts always move beside steps"),
    "policy": ("default", "there is no other policy"),
    "communicator": (None, "ranks exchange through the memory that they share"),
    "log_balancedness": (False, "the metric penstock_expert_balancedness always tells it"),
    "log_balancedness_interval": (None, "the metric penstock_expert_balancedness always tells it"),
}
"""Keys of vLLM that leave no choice here: the value that changes nothing, and why."""


class EplbArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that there are."""

    window_size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1000
    step_interval: Annotated[int, msgspec.Meta(ge=1)] = 3000
    num_redundant_experts: Annotated[int, msgspec.Meta(ge=0)] = 0


def eplb_config(config: Mapping[str, Any] | None, *, enabled: bool, experts: bool, ranks: int) -> EplbConfig | None:
    """The typed form of the two flags; None: experts stay where they are.

    Args:
        config: `--eplb-config`.
        enabled: `--enable-eplb`.
        experts: `--enable-expert-parallel`.
        ranks: Among which experts would be divided.

    Raises:
        ConfigError: An unknown key, a wrong value or a contradiction; it names the flag and the key.
    """
    if not enabled:
        if config is not None:
            raise ConfigError("--eplb-config needs --enable-eplb")
        return None
    if not experts:
        raise ConfigError("--enable-eplb needs --enable-expert-parallel")
    if ranks == 1:
        raise ConfigError(
            "--enable-eplb: there is one rank, which has all experts (--data-parallel-size, --tensor-parallel-size)"
        )
    given = dict(config or {})
    for key, (value, reason) in _FIXED.items():
        if key in given and given.pop(key) != value:
            raise ConfigError(f"--eplb-config: {key}: {reason}; remove it")
    try:
        args = msgspec.convert(given, EplbArgs)
    except msgspec.ValidationError as error:
        wrong = explained(error, EplbArgs)
        raise ConfigError(f"--eplb-config: {wrong.field}: {wrong.problem}") from None
    return EplbConfig(**msgspec.structs.asdict(args))
