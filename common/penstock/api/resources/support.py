"""Fields of the API that are not implemented yet. The operator refuses them by name."""

from collections.abc import Iterator
from typing import Final

from penstock.api.kv_pairs import alike
from penstock.api.resources.model import InferenceModelSpec
from penstock.api.resources.pools import Parallelism, Pool

DRAFTS: Final = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "auto")
"""Methods of speculative decoding that engines have."""

WEIGHTS: Final = (
    "int8_per_channel_weight_only",
    "int8_per_group_32",
    "int4_per_group_32",
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_per_block",
)
"""Schemes by which engines quantize weights while they load them."""
CONNECTORS: Final = ("none", "offload", "transfer")
"""Ways in which KV cache leaves a replica."""
KV_CACHES: Final = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
"""Types of KV caches that engines have."""


def unsupported(spec: InferenceModelSpec) -> list[str]:
    """Paths of the fields that are set and that this version cannot honour, with a word on what works; empty: all is honoured."""
    transfers = spec.engine.connector.type == "transfer"
    pools = (path for pool in spec.pools for path in _pool(pool, transfers=transfers))
    return [*_source(spec), *_engine(spec), *_rest(spec), *pools, *_pairs(spec)]


def _source(spec: InferenceModelSpec) -> Iterator[str]:
    source = spec.source
    if source.revision is not None and not source.uri.startswith("hf://"):
        yield "spec.source.revision (only hf:// has revisions)"


def _engine(spec: InferenceModelSpec) -> Iterator[str]:
    engine = spec.engine
    yield from _quantization(spec)
    if engine.speculative is not None and engine.speculative.method not in DRAFTS:
        yield f"spec.engine.speculative.method ({engine.speculative.method}; {', '.join(DRAFTS)} work)"
    yield from _connector(spec)


def _connector(spec: InferenceModelSpec) -> Iterator[str]:
    kind, path = spec.engine.connector.type, "spec.engine.connector.type"
    devices = [pool.name for pool in spec.pools if pool.has_devices]
    if kind not in CONNECTORS:
        yield f"{path} ({kind}; {', '.join(CONNECTORS)} work)"
    elif kind != "none" and devices:
        yield f"{path} (pool {devices[0]} has devices; {kind} works on CPUs alone)"
    elif kind == "transfer" and all(pool.role == "Both" for pool in spec.pools):
        yield f"{path} (transfer is for pools of the roles Prefill and Decode)"
    elif kind == "transfer" and any(argument.partition("=")[0] == "--ssl-certfile" for argument in spec.engine.extra_args):
        yield f"{path} (transfer does not go with --ssl-certfile)"


def _quantization(spec: InferenceModelSpec) -> Iterator[str]:
    found, path = spec.engine.quantization, "spec.engine.quantization"
    if found is None:
        return
    if found.weights is not None and found.weights not in WEIGHTS:
        yield f"{path}.weights ({found.weights}; {', '.join(WEIGHTS)} work)"
    if found.kv_cache is not None and found.kv_cache not in KV_CACHES:
        yield f"{path}.kvCache ({found.kv_cache}; {', '.join(KV_CACHES)} work)"
    if found.activations is not None:
        yield f"{path}.activations (a checkpoint's own scheme is followed; there is no other)"


def _rest(spec: InferenceModelSpec) -> Iterator[str]:
    if spec.lora is not None:
        for number, source in enumerate(spec.lora.sources):
            path = f"spec.lora.sources[{number}]"
            scheme = source.prefix.partition("://")[0] if "://" in source.prefix else "file"
            if scheme not in ("file", "hf"):
                yield f"{path}.prefix ({scheme}://; hf://, file:// and plain paths work)"
            if source.secret_ref is not None:
                yield f"{path}.secretRef"


def _pairs(spec: InferenceModelSpec) -> Iterator[str]:
    """Pools of one role whose replicas could exchange KV pages with none of the other."""
    for role, other in (("Prefill", "Decode"), ("Decode", "Prefill")):
        others = [kv_alike(spec, pool.parallelism) for pool in spec.pools if pool.role == other]
        for pool in spec.pools:
            ours = kv_alike(spec, pool.parallelism)
            if pool.role != role or not others or ours in others:
                continue
            name = next((name for name in ours if ours[name] not in [it[name] for it in others]), "tensor")
            yield f"spec.pools[{pool.name}].parallelism.{name} (no pool of the other role has the same, as pairs need)"


def kv_alike(spec: InferenceModelSpec, ranks: Parallelism) -> dict[str, int]:
    """What must be equal in two pools whose replicas hand KV pages over to each other."""
    drafts = spec.engine.speculative
    return alike(ranks.tensor, ranks.pipeline, None if drafts is None else drafts.method)


def _pool(pool: Pool, *, transfers: bool) -> Iterator[str]:
    path, ranks = f"spec.pools[{pool.name}]", pool.parallelism
    if pool.role != "Both" and not transfers:
        yield f"{path}.role ({pool.role}; it needs engine.connector of type transfer)"
    for name, number in (("tensor", ranks.tensor), ("pipeline", ranks.pipeline), ("data", ranks.data)):
        if number != 1 and pool.has_devices:
            yield f"{path}.parallelism.{name} (only 1 works with devices; more work on CPUs)"
    if ranks.expert.enabled and pool.has_devices:
        yield f"{path}.parallelism.expert.enabled (experts are spread on CPUs alone)"
    elif ranks.expert.enabled and ranks.pipeline != 1 and ranks.data != 1:
        yield f"{path}.parallelism.expert.enabled (it does not go with parallelism.pipeline and parallelism.data together)"
    if ranks.expert.balancing is not None and ranks.tensor * ranks.data == 1:
        field = "redundant" if ranks.expert.eplb is None else "eplb"
        yield f"{path}.parallelism.expert.{field} (it needs tensor times data above 1)"
    if ranks.nodes != 1 and ranks.data == 1 and ranks.expert.enabled:
        yield f"{path}.parallelism.expert.enabled (it does not go with a core on several nodes: data is 1)"
