"""The table of docs/engine/metrics.md is what the code tells."""

import re
from pathlib import Path

import msgspec

from penstock.api import metrics as names
from penstock.api.load_report import LoadReport
from penstock.engine.core.plan import GraphReport
from penstock.engine.cost import StepCost
from penstock.engine.frontend.observe.metrics import EngineMetrics, Metrics
from penstock.engine.roofline import Ceilings
from penstock.engine.stats import (
    Buckets,
    CoreStats,
    DraftStats,
    EncoderStats,
    ExpertStats,
    GrammarStats,
    GraphSteps,
    OffloadStats,
    Roofline,
    StepStats,
    TierStats,
    TransferStats,
)

PAGE = Path(__file__).parents[3] / "docs/engine/metrics.md"


def test_the_table_names_every_metric_with_its_type_and_labels():
    engine = EngineMetrics("m")
    engine.describe(names.ENGINE_INFO, "What runs.", version="", dtype="", quantization="", kernels="")
    engine.describe(names.CACHE_CONFIG_INFO, "The KV cache.", block_size="", num_gpu_blocks="", cache_dtype="")
    engine.describe(names.LOAD_SECONDS, "Of the start.", 1.5, part="weights")
    engine.describe(names.LOAD_FLOOR_SECONDS, "At least.", 1.5)
    step = StepStats(Buckets([0] * 25, 0.0), Buckets([0] * 14, 0.0), sampled_tokens=0, not_finite=0, cost=StepCost())
    step = msgspec.structs.replace(step, roofline=Roofline(Ceilings(1.0, 1.0), 0.0))
    step = msgspec.structs.replace(step, graphs=[GraphSteps("FULL", "uniform", 1, 3, 1)], drafts=DraftStats(1, [1], [0]))
    report = LoadReport(epoch=1, seq=1, lora_slots=1)
    engine.stats = CoreStats(report, 0, 0, 0, 0, step=step, graphs=GraphReport(1, 0, 0, 0, 0.0))
    engine.stats = msgspec.structs.replace(
        engine.stats, waits={"capacity": Buckets([0] * 17, 0.0)}, grammars=GrammarStats(1, 0, 0, 0.1)
    )
    tiers = OffloadStats(TierStats(*[0] * 8), {"disk": TierStats(*[0] * 8)}, 0, 0, TransferStats(*[0] * 7))
    engine.stats = msgspec.structs.replace(
        engine.stats, offload=tiers, encoder=EncoderStats(*[0] * 8), experts=ExpertStats([0, 0], 0.0, 0, 0)
    )
    base = {"model_name", "engine", "le"}
    told = {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - base)
        for family in Metrics([engine]).collect()
    }
    rows = re.findall(r"^\| `(penstock_\w+)` \| (\w+) \| ([^|]*)\|", PAGE.read_text(), flags=re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert documented == told
