"""Schemes of `--quantization`. Light to import: `penstock --help` lists them."""

from typing import Literal

QuantizationName = Literal["int8_per_channel_weight_only", "int8_per_group_32", "int4_per_group_32"]
"""How weights are quantized while they are loaded; see `docs/engine/quantization.md`."""
