"""PromQL in pieces. Series of engines have the labels namespace, model, pool and pod, as the PodMonitors give them; of the
gateway, `model` is `namespace/name` and `pool` is `namespace/name/pool`; of the operator, all of them are its own."""

from typing import Final

WINDOW: Final = "$__rate_interval"

# Variables of the dashboards, in the three ways in which series say whose they are.
MODEL: Final = 'namespace=~"$namespace",model=~"$model"'
POOL: Final = MODEL + ',pool=~"$pool"'
REPLICA: Final = POOL + ',pod=~"$replica"'
AT_GATEWAY: Final = 'model=~"($namespace)/($model)"'
POOL_AT_GATEWAY: Final = 'pool=~"($namespace)/($model)/.+"'
REPLICA_AT_GATEWAY: Final = 'replica=~"$replica"'

# Of Envoy, whose cluster of a pool is called `namespace/name/pool`, and those of the gateways `penstock_…`.
ENVOY_CLIENTS: Final = 'envoy_http_conn_manager_prefix="penstock"'
ENVOY_POOLS: Final = 'envoy_cluster_name=~"($namespace)/($model)/.+"'
ENVOY_PICKER: Final = 'envoy_cluster_name=~"penstock_(gateway|picker)"'

# Of NVIDIA's DCGM exporter, which labels them with the pod that has the GPU.
GPU_BUSY: Final = "DCGM_FI_DEV_GPU_UTIL"
GPU_MEMORY_USED: Final = "DCGM_FI_DEV_FB_USED"
GPU_XID: Final = "DCGM_FI_DEV_XID_ERRORS"
GPU_DOUBLE_BIT_ERRORS: Final = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"


def series(name: str, *selectors: str) -> str:
    """The series of that name."""
    chosen = ",".join(it for it in selectors if it)
    return f"{name}{{{chosen}}}" if chosen else name


def total(name: str, *selectors: str, by: str = "") -> str:
    """The sum of a gauge."""
    return f"sum{_by(by)} ({series(name, *selectors)})"


def rate(name: str, *selectors: str, by: str = "", window: str = WINDOW, part: str = "_total") -> str:
    """A counter's growth a second; `part` is `_sum` or `_count` for a histogram's."""
    return f"sum{_by(by)} (rate({series(name + part, *selectors)}[{window}]))"


def buckets(name: str, *selectors: str, window: str = WINDOW, by: str = "le") -> str:
    """A histogram's buckets, a second: for a heatmap."""
    return rate(name, *selectors, by=by, window=window, part="_bucket")


def quantile(share: float, name: str, *selectors: str, by: str = "", window: str = WINDOW) -> str:
    """A percentile, as precise as the histogram's buckets are dense."""
    return f"histogram_quantile({share}, {buckets(name, *selectors, window=window, by=f'le, {by}' if by else 'le')})"


def mean(name: str, *selectors: str, by: str = "", window: str = WINDOW) -> str:
    """A histogram's mean."""
    sums, counts = (rate(name, *selectors, by=by, window=window, part=part) for part in ("_sum", "_count"))
    return f"{sums} / {counts}"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
