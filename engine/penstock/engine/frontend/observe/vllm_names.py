"""The engine's metrics under vLLM's names too, so that dashboards and routers made for those read them."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Sample

from penstock.api import metrics as names
from penstock.engine.frontend.observe.series import Family

_SOURCES = {"computed": "local_compute", "local_cache": "local_cache_hit"}


def vllm_families(families: Iterable[Family]) -> Iterator[Family]:
    """What vLLM calls these, with its labels; nothing for what it does not have."""
    for family in families:
        if family.name in names.VLLM_NAMES:
            yield _renamed(family, names.VLLM_NAMES[family.name])
        elif family.name == names.NUM_REQUESTS_WAITING:
            yield _summed(family, GaugeMetricFamily, "vllm:num_requests_waiting", drop="reason")
            by_reason = "vllm:num_requests_waiting_by_reason"
            yield _summed(family, GaugeMetricFamily, by_reason, values=lambda reason: _reason(reason), label="reason")
        elif family.name == names.PROMPT_TOKENS:
            yield _summed(family, CounterMetricFamily, "vllm:prompt_tokens", drop="source")
            by_source = "vllm:prompt_tokens_by_source"
            yield _summed(family, CounterMetricFamily, by_source, values=lambda source: _SOURCES[source], label="source")
        elif family.name == names.ESTIMATED_FLOPS:
            yield _summed(family, CounterMetricFamily, "vllm:estimated_flops_per_gpu", drop="part")
        elif family.name == names.ESTIMATED_READ_BYTES:
            yield _summed(family, CounterMetricFamily, "vllm:estimated_read_bytes_per_gpu", drop="part")


def _reason(reason: str) -> str:
    """vLLM knows two: no room, and anything else."""
    return "capacity" if reason == "capacity" else "deferred"


def _renamed(family: Family, name: str) -> Family:
    """The same samples under another name, suffixes kept."""
    renamed = copy(family)
    renamed.name = name
    renamed.samples = [sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples]
    return renamed


def _summed(
    family: Family,
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    *,
    drop: str = "",
    label: str = "",
    values: Callable[[str], str] = str,
) -> Family:
    """Under another name, without the label `drop`, or with other values of `label`; samples that become equal are added up."""
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = {key: values(value) if key == label else value for key, value in sample.labels.items() if key != drop}
        key = tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    summed = kind(name, family.documentation)
    suffix = "_total" if kind is CounterMetricFamily else ""
    summed.samples = [Sample(name + suffix, dict(labels), value) for labels, value in sums.items()]
    return summed
