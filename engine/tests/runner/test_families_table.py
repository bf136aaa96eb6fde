"""The table of `docs/engine/models.md` that says what is shown of each architecture, made from what the tests run over."""

import os
from collections.abc import Iterable
from pathlib import Path

import test_batch_invariance
import test_device_models
import test_lora_parity
import test_mtp
import test_tensor_parallel
from tiny_models import CONFIGS

from penstock.engine.models.registry import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "engine" / "models.md"
BEGIN, END = "<!-- made by make models-table -->", "<!-- end -->"
SAME = {"KimiK2ForCausalLM": "DeepseekV3ForCausalLM"}
"""Served by the same code in every respect, under a name of its own that transformers lacks."""


def architectures(names: Iterable[str]) -> set[str]:
    """Of tiny models."""
    found = {f"{CONFIGS[name][0]}ForCausalLM" for name in names}
    return found | {name for name, other in SAME.items() if other in found}


def table() -> str:
    """All rows, with the head."""
    invariant = [*(variant[0] for variant in test_batch_invariance.VARIANTS), *test_batch_invariance.FAMILY_NAMES]
    columns = {
        "equal to transformers": architectures(CONFIGS),
        "same bits in any batch": architectures(invariant),
        "steps on a device": architectures(test_device_models.NAMES),
        "adapters": architectures(test_lora_parity.FAMILIES),
        "ranks": architectures(test_tensor_parallel.WORLDS),
        "MTP layer": architectures(test_mtp.LAYERS) - {"LlamaForCausalLM"},
    }
    lines = [f"| architecture | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    lines += [
        f"| `{name}` | {' | '.join('yes' if name in shown else '' for shown in columns.values())} |"
        for name in sorted(columns["equal to transformers"])
    ]
    return "\n".join(lines)


def test_the_page_has_the_table_of_today():
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    written, found, after = rest.partition(END)
    assert found, f"{PAGE} has lost the marks of the table"
    if os.environ.get("RENEW"):
        PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")
    else:
        assert written.strip() == table(), "make models-table"


def test_no_architecture_is_served_that_is_not_compared():
    text_alone = {name for name, family in FAMILIES.items() if not family.reads_images}
    assert text_alone == architectures(CONFIGS)


def test_the_page_describes_every_architecture():
    described = PAGE.read_text().partition(BEGIN)[0]
    assert not [name for name in FAMILIES if f"`{name}`" not in described]
