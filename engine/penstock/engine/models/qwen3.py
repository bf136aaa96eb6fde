"""Qwen3's dense models (Qwen team, 2025): Llama with RMSNorm of each head's queries and keys."""

from typing import ClassVar

from penstock.engine.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    qk_norm: ClassVar[bool] = True
