"""What a core can be told to do: carried out by `core.control`, between two steps, and answered."""

from typing import Annotated, Literal, get_args

import msgspec


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget every cached block; refused while requests hold any."""

    reset_running_requests: bool = False
    """Take the blocks from the requests that hold them. Those requests compute their tokens again."""


class PinPrefix(msgspec.Struct, frozen=True, tag="pin_prefix"):
    """Keep what is cached of these tokens, in full blocks, from being evicted; a forced reset, sleep and new weights end it.
    Refused where nothing of them is cached, the name is taken, or a sequence of full length would no longer fit. The result's
    `tokens`: how many are pinned."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)]
    cache_salt: str | None = None
    """The salt of the requests that should find them."""
    tenant: str = ""


class UnpinPrefix(msgspec.Struct, frozen=True, tag="unpin_prefix"):
    """Let a pinned prefix go."""

    name: str


PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests when the engine pauses: `abort` ends all with a retriable error; `wait` lets running ones finish;
`keep` stops running ones where they are. Those that `wait` and `keep` leave go on after the pause, as do those that come during
it."""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Make no step until `Resume`; done when nothing runs any more."""

    mode: PauseMode = "abort"
    clear_cache: bool = True
    """Forget every cached block too, those of requests that `keep` keeps included."""


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Go on after a pause; refused while asleep. A `Pause` that still waits is answered with an error."""


Tag = Literal["weights", "kv_cache"]
"""Memory that sleeps and wakes by itself."""
TAGS: tuple[Tag, ...] = get_args(Tag)


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Pause, forget the KV cache and give its memory back; at level 2 also the weights'. New requests are refused meanwhile."""

    level: Literal[1, 2] = 1
    mode: PauseMode = "abort"


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Undo `Sleep`, for some of the memory or all; with the last of it the engine goes on. After level 2 the weights' memory is
    there and empty: `ReloadWeights` fills it."""

    tags: tuple[Tag, ...] = TAGS


class ReloadWeights(msgspec.Struct, frozen=True, tag="reload_weights"):
    """Read the weights again, between two steps. Running requests continue with the new ones and compute their tokens again."""

    path: str | None = None
    """A checkpoint of the same architecture and shapes; None: the one that was read last."""


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Profile every step from now on."""


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End the profile; its result is `{"path": …}`, the trace's file on the core's machine."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Read an adapter and let requests ask for it; answered when that is done. Files are read beside the steps. Of no effect
    where the same one is there already."""

    name: str
    """What clients put in `model`."""
    uri: str
    """A folder in PEFT's format, `file://…` or `hf://org/name`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    replace: bool = False
    """Put it in the place of another one of this name, which is refused otherwise: requests see the one or the other."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Let no more requests ask for an adapter; those that have go on."""

    name: str


class SyncAdapters(msgspec.Struct, frozen=True, tag="sync_adapters"):
    """Do nothing. The answer comes after all earlier messages about adapters, so a caller that has it knows them."""


Command = (
    ResetPrefixCache
    | PinPrefix
    | UnpinPrefix
    | Pause
    | Resume
    | Sleep
    | WakeUp
    | ReloadWeights
    | StartProfile
    | StopProfile
    | LoadAdapter
    | UnloadAdapter
    | SyncAdapters
)
"""What a core can be told to do: carried out by `core.control.controls`, between two steps."""
