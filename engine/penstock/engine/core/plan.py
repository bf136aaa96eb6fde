"""The three columnar messages between the scheduler and every rank, keyed by `step_id`.

A plan says how many tokens of which row, never positions, slots, lengths or sampled ids: the runner derives those from its own
state (`num_computed[row]`, the row's tokens, its drafts), so that a plan can be made and submitted before the previous step's
result is known. Drafts are guesses of the tokens after the last known one. A step verifies them: it accepts some from the left
and samples one more token, and the KV of the others is as if it had never been written.

A row is a stable integer from a request's admission to its release; nothing is condensed. All arrays are numpy, int32 unless
said.
"""

from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine.multimodal.inputs import EncoderRun
from penstock.engine.sampling import SamplingParams
from penstock.prompt.hashing import PromptItem

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


def empty(*shape: int) -> Int32:
    """An int32 array without elements, or with undefined ones where a shape is given."""
    return np.empty(shape or (0,), dtype=np.int32)


NONE = empty()
"""Most plans have no drafts, no masks and no failures: they share what says so."""
NONE.flags.writeable = False
_NO_MASKS = empty(0, 0)
_NO_MASKS.flags.writeable = False


def _none() -> Int32:
    return NONE


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a row: a new one, or one that resumes after preemption. Sent once; later plans carry changes alone."""

    row: int
    token_ids: Int32
    """[n]: all tokens known, the prompt and what was generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV the prefix cache supplies; the first chunk starts here."""
    sampling: SamplingParams
    lora_slot: int = -1
    """Slot of its adapter; -1: it has none."""
    guided: bool = False
    """Whether masks may come with its steps: none of them may choose a token before `SampleInputs` are there."""
    items: tuple[PromptItem, ...] = ()
    """Images or embeddings in place of tokens, in prompt order."""
    grids: tuple[tuple[int, int], ...] = ()
    """Rows and columns of the embeddings of each item, where the model's positions follow them."""


class SlotLoad(msgspec.Struct, frozen=True, array_like=True):
    """An adapter takes a LoRA slot, in place of what is there."""

    slot: int
    copy: int
    """The number by which `Runner.read_adapter` was told to read it."""


class Transfers(msgspec.Struct, frozen=True, array_like=True):
    """Pages to copy between the KV cache and the host's memory: stores first, then loads."""

    store_blocks: Int32
    """[s]: from these blocks."""
    store_slots: Int32
    """[s]: to these slots."""
    load_blocks: Int32
    """[l]: to these blocks."""
    load_slots: Int32
    """[l]: from these slots."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Applied in the order: LoRA slots, releases, admissions, block appends, then the rows run. A plan may have no
    rows."""

    step_id: int
    released: Int32
    """[x]: rows whose requests ended or were preempted since the last plan; their state is dropped first."""
    admissions: list[Admission]
    append_rows: list[Int32]
    """Per KV group, [a]: the row whose block table grows, in the order of the appends."""
    append_blocks: list[Int32]
    """Per KV group, [a]: the block appended; an admission's whole table (cached blocks first) comes this way too. A row has
    blocks for all its drafts, whether they are accepted or not, and keeps them."""
    rows: Int32
    """[r]: rows that run, decodes first."""
    num_new_tokens: Int32
    """[r]: tokens of each, its drafts included."""
    samples: Bool
    """[r]: whether the row reaches its last known token, so that its sampled token counts. False in the middle of a prompt."""
    lora_loads: list[SlotLoad] = []
    lora_drops: list[int] = []
    """Copies that the host's memory need not keep, once the slots are loaded."""
    num_drafts: Int32 = msgspec.field(default_factory=_none)
    """[r]: how many of `num_new_tokens` lie beyond the row's last known token and are to be verified; [0] where no row has any. A
    runner that has fewer drafts of a row fills up with what it does not accept."""
    draft_rows: Int32 = msgspec.field(default_factory=_none)
    """[f]: indexes into `rows`, ascending: rows whose drafts come with the plan. All others' are the runner's own."""
    draft_ids: Int32 = msgspec.field(default_factory=_none)
    """[d]: the drafts of `draft_rows`, one row after the other."""
    transfers: Transfers | None = None
    """Carried out beside the rows, which neither write to the blocks stored nor read those loaded."""
    encoder_frees: list[str] = []
    """Images whose embeddings the runner drops, before anything else."""
    encoder_runs: list[EncoderRun] = []
    """Images whose embeddings it makes and keeps, before the rows run."""


class SampleInputs(msgspec.Struct, frozen=True, array_like=True):
    """What sampling needs beyond the plan, sent while the forward pass runs."""

    step_id: int
    masked_rows: Int32 = msgspec.field(default_factory=_none)
    """[g]: indexes into the plan's `rows`, ascending: rows that may sample certain tokens alone."""
    bitmask: Int32 = msgspec.field(default_factory=lambda: _NO_MASKS)
    """[l, words]: for each logits row of `masked_rows`, 1 + `num_drafts` of each, a bit a token of the vocabulary: token t is
    allowed where bit t % 32 of word t // 32 is set."""


class SampledLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of the tokens of rows that asked for them (natural logarithm)."""

    plan_rows: Int32
    """[m]: indexes into the plan's `rows`; a row with several tokens stands here as often, in their order."""
    sampled: Float32
    """[m]: of the sampled token."""
    ranks: Int32
    """[m]: 0 for the likeliest."""
    top_ids: Int32
    """[m, k], likeliest first; -1 pads."""
    top_logprobs: Float32
    """[m, k]."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of prompt tokens, given those before them, that a step has computed for the requests that asked."""

    plan_rows: Int32
    """[p]: indexes into the plan's `rows`."""
    positions: Int32
    """[p]: of the token in its prompt."""
    token_ids: Int32
    """[p]."""
    logprobs: Float32
    """[p]: of the token."""
    ranks: Int32
    """[p]: 0 for the likeliest."""
    top_ids: Int32
    """[p, k], likeliest first; -1 pads."""
    top_logprobs: Float32
    """[p, k]."""


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings of the plan's rows whose prompts a step has computed to their ends, as pooled: neither cut nor normalised."""

    plan_rows: Int32
    """[m]: indexes into the plan's `rows`."""
    vectors: Float32
    """[m, size]."""


class GraphStep(msgspec.Struct, frozen=True, array_like=True):
    """How a step was launched."""

    mode: str
    """NONE, PIECEWISE or FULL."""
    reason: str
    """Why it had that mode and no better one."""
    num_tokens: int
    num_padded_tokens: int
    """Tokens with the padding up to the graph's size."""


class GraphReport(msgspec.Struct, frozen=True, array_like=True):
    """The CUDA graphs of an engine."""

    captured: int
    pending: int
    """Graphs to capture while the engine is idle."""
    failed: int
    """Captures that failed: such steps run without a graph."""
    num_bytes: int
    """The device's memory that they take."""
    seconds: float
    """Spent on captures."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced, in the order of the plan's rows."""

    step_id: int
    token_ids: Int32
    """[r, 1 + K]: of each row the drafts accepted and then the token sampled, K being the most drafts of a row."""
    counts: Int32
    """[r]: how many of them count: 0 where the plan did not sample, otherwise 1 to 1 + `num_drafts`."""
    logprobs: SampledLogprobs | None = None
    failed: dict[int, str] = {}
    """Index into the plan's rows → what is wrong with that request alone."""
    prompt_logprobs: PromptLogprobs | None = None
    not_finite: Int32 = msgspec.field(default_factory=_none)
    """[f]: indexes into the plan's rows, of those `failed` whose logits are not finite. What the cache holds of them may be the
    cause, and must not be found again."""
    graph: GraphStep | None = None
    """None: the device has no graphs."""
    pooled: Pooled | None = None
    """None: the engine generates."""
    drafts: Int32 | None = None
    """[r, K]: what the runner will have verified in each row's next step, -1 pads. None: the host need not know."""
    transfer_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that the plan's stores and loads took."""
    encoder_s: float = 0.0
    """Seconds that the plan's images took."""

    @property
    def num_not_finite(self) -> int:
        """Requests whose logits are not finite."""
        return len(self.not_finite)


class SampledTokens(msgspec.Struct, frozen=True, array_like=True):
    """What pipeline stages that do not sample must know of a step's result, whose fields these are."""

    step_id: int
    token_ids: Int32
    counts: Int32
    drafts: Int32 | None


def ints(array: Int32 | Int64) -> list[int]:
    """The elements as Python's integers."""
    return cast("list[int]", array.tolist())


_DTYPES = {"i": np.dtype(np.int32), "f": np.dtype(np.float32), "?": np.dtype(np.bool_)}


def enc_hook(value: Any) -> Any:
    """msgspec hook: a numpy array as (type, bytes), with its shape where it has several dimensions; 0 is `NONE`."""
    if isinstance(value, np.ndarray):
        array = cast("npt.NDArray[Any]", value)  # quoted: to build that type for each array takes most of an encoder's time
        kind = array.dtype.char
        if array.ndim != 1:
            return kind, array.tobytes(), array.shape
        return (kind, array.tobytes()) if array.size or kind != "i" else 0
    raise TypeError(f"{type(value).__name__} has no place in a plan")


def dec_hook(_kind: type, value: Any) -> Any:
    """msgspec hook: the inverse of `enc_hook`."""
    if not value:
        return NONE
    array = np.frombuffer(value[1], _DTYPES[value[0]])
    return array if len(value) == 2 else array.reshape(value[2])
