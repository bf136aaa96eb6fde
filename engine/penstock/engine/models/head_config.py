"""What the checkpoint of a draft head says: EAGLE-1, EAGLE-3, EAGLE-3 as speculators saves it, and MTP layers. No torch."""

from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from penstock.engine.config import ConfigError
from penstock.engine.models.config import DecoderConfig, parse_decoder_config

HeadKind = Literal["eagle", "eagle3", "mtp"]
SPECULATORS: Final = "speculators_model_type"


class HeadConfig(NamedTuple):
    """A head's shape, and what it takes from its target."""

    kind: HeadKind
    decoder: DecoderConfig
    """Of the head's own layers."""
    target_hidden_size: int
    draft_vocab_size: int
    """Logits of the head; fewer than the vocabulary where it drafts frequent tokens alone."""
    aux_layers: tuple[int, ...]
    """Whose input the head takes: k is the residual stream after k layers. Empty: the state after the final norm."""
    layer_name: str
    """Before the names of the tensors of layer `{}`."""
    has_embedding: bool
    """Whether the checkpoint brings an embedding; else the target's serves."""
    has_lm_head: bool
    fc_bias: bool
    norm_before_residual: bool
    """EAGLE-3: whether the residual stream begins with the normalised state."""
    norm_before_fc: bool
    """EAGLE-3: whether the target's states are normalised first."""
    architecture: str = ""
    """MTP: the target's, whose kind of decoder layer it has."""
    recycles_normed: bool = False
    """MTP: whether a further draft starts from the state after the norm; otherwise from the one before it."""

    @property
    def states_size(self) -> int:
        """Of the target's states of a token."""
        return max(len(self.aux_layers), 1) * self.target_hidden_size


def head_kind(tensors: Collection[str]) -> HeadKind | None:
    """The kind of head that has these tensors; None: a whole model."""
    if "fc.weight" not in tensors:
        return None
    return "eagle3" if any(name.endswith(".hidden_norm.weight") for name in tensors) else "eagle"


def parse_head_config(raw: Mapping[str, Any], tensors: Collection[str], target: DecoderConfig) -> HeadConfig:
    """Reads `config.json`'s object.

    Args:
        raw: The object.
        tensors: Names of the checkpoint's tensors, `fc.weight` among them.
        target: The model that the head drafts for.

    Raises:
        ConfigError: A field is missing, asks for something that is not implemented, or does not fit the target.
    """
    kind = head_kind(tensors)
    assert kind is not None
    _refuse(raw)
    own = dict(raw.get("transformer_layer_config") or raw)
    decoder = parse_decoder_config(own | {"architectures": ["LlamaForCausalLM"], "vocab_size": own.get("vocab_size", 0)})
    eagle = raw.get("eagle_config") or {}
    draft_vocab_size = int(raw.get("draft_vocab_size") or decoder.vocab_size)
    if (asked := raw.get("target_hidden_size")) not in (None, target.hidden_size):
        raise ConfigError(f"target_hidden_size is {asked}, and the model's hidden_size is {target.hidden_size}")
    if "lm_head.weight" not in tensors and (draft_vocab_size, decoder.hidden_size) != (target.vocab_size, target.hidden_size):
        raise ConfigError(
            f"the head has no lm_head.weight, and the model's takes states of {target.hidden_size} and gives "
            f"{target.vocab_size:,} logits where the head has {decoder.hidden_size} and {draft_vocab_size:,}"
        )
    if "embed_tokens.weight" not in tensors and decoder.hidden_size != target.hidden_size:
        raise ConfigError(f"the head has no embed_tokens.weight, and its hidden_size {decoder.hidden_size} is not the model's")
    return HeadConfig(
        kind=kind,
        decoder=decoder,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=_aux_layers(raw, target.num_layers) if kind == "eagle3" else (),
        layer_name="midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.{}",
        has_embedding="embed_tokens.weight" in tensors,
        has_lm_head="lm_head.weight" in tensors,
        fc_bias="fc.bias" in tensors,
        norm_before_residual=bool(raw.get("norm_before_residual", SPECULATORS in raw)),
        norm_before_fc=bool(raw.get("norm_before_fc", eagle.get("norm_before_fc", False))),
    )


def parse_mtp_config(raw: Mapping[str, Any], tensors: Collection[str] | None) -> HeadConfig | None:
    """Reads the `config.json` of a target for its MTP layer, the first one if there are several.

    Args:
        raw: The object.
        tensors: Names of the checkpoint's tensors; None: it has no files.

    Returns:
        None if the checkpoint has no such layer.

    Raises:
        ConfigError: As `parse_decoder_config`.
    """
    target, architecture = parse_decoder_config(raw), str(raw["architectures"][0])
    name = f"model.layers.{target.num_layers}"
    if not target.further_layers or (tensors is not None and f"{name}.enorm.weight" not in tensors):
        return None
    experts = target.experts
    return HeadConfig(
        kind="mtp",
        decoder=msgspec.structs.replace(
            target,
            num_layers=1,
            windows=target.windows[-1:],
            ropes=target.ropes[-1:],
            experts=None if experts is None else msgspec.structs.replace(experts, layers=experts.layers[-1:]),
            further_layers=0,
        ),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=(),
        layer_name=name,
        has_embedding=False,
        has_lm_head=False,
        fc_bias=False,
        norm_before_residual=False,
        norm_before_fc=False,
        architecture=architecture,
        recycles_normed=not architecture.startswith("Glm"),
    )


def proposed_tokens(raw: Mapping[str, Any]) -> int | None:
    """Drafts in a step that a checkpoint in speculators' format proposes; None: it says nothing of it."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def _refuse(raw: Mapping[str, Any]) -> None:
    kind, eagle = raw.get(SPECULATORS, "eagle3"), raw.get("eagle_config") or {}
    if kind not in ("eagle", "eagle3"):
        raise ConfigError(f"config.json: {SPECULATORS} {kind!r} is not supported (supported: eagle, eagle3)")
    for field in ("fc_norm", "norm_output"):
        if raw.get(field):
            raise ConfigError(f"config.json: {field} is {raw[field]!r}, which is not supported")
    if eagle.get("use_aux_hidden_state") is False:
        raise ConfigError("config.json: eagle_config.use_aux_hidden_state is false, which is not supported")


def _aux_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Three layers of the target, by the convention that k is the stream after k layers.

    Checkpoints say which in two conventions. One whose first layer is 1 means the output of layer k, counted from 0.
    """
    named = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    found = tuple(named or (2, num_layers // 2, num_layers - 3))
    if named and found[0] == 1:
        found = tuple(layer + 1 for layer in found)
    wrong = [layer for layer in found if not isinstance(layer, int) or not 0 <= layer < num_layers]
    if wrong or len(set(found)) < len(found):
        raise ConfigError(
            f"config.json: eagle_aux_hidden_state_layer_ids {list(found)}: the model has {num_layers} layers, and the head takes "
            "the inputs of several of them"
        )
    return found
