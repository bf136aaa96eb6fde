"""The table of docs/engine/metrics.md is what the code tells."""

import re
from pathlib import Path

from penstock.api import metrics as names
from penstock.api.load_report import LoadReport
from penstock.engine.cost import StepCost
from penstock.engine.frontend.observe.metrics import EngineMetrics, Metrics
from penstock.engine.messages import Buckets, CoreStats, StepStats

PAGE = Path(__file__).parents[3] / "docs/engine/metrics.md"


def test_the_table_names_every_metric_with_its_type_and_labels():
    engine = EngineMetrics("m")
    engine.describe(names.ENGINE_INFO, "What runs.", version="", dtype="", kernels="")
    engine.describe(names.CACHE_CONFIG_INFO, "The KV cache.", block_size="", num_gpu_blocks="", cache_dtype="")
    step = StepStats(Buckets([0] * 25, 0.0), Buckets([0] * 14, 0.0), sampled_tokens=0, not_finite=0, cost=StepCost())
    engine.stats = CoreStats(LoadReport(epoch=1, seq=1), 0, 0, 0, 0, step=step)
    base = {"model_name", "engine", "le"}
    told = {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - base)
        for family in Metrics([engine]).collect()
    }
    rows = re.findall(r"^\| `(penstock_\w+)` \| (\w+) \| ([^|]*)\|", PAGE.read_text(), flags=re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert documented == told
