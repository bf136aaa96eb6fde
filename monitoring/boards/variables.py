"""Choices that dashboards share, by what each is looked for in."""

from typing import Final

from monitoring.panels import Variable
from monitoring.queries import MODEL, POOL, series
from penstock.api import metrics

NAMESPACE: Final = Variable("namespace", metrics.POOL_REPLICAS)
MODELS: Final = Variable("model", series(metrics.POOL_REPLICAS, 'namespace=~"$namespace"'))
POOLS: Final = Variable("pool", series(metrics.POOL_REPLICAS, MODEL))
REPLICAS: Final = Variable("replica", series(metrics.KV_CACHE_USAGE, POOL), "pod")
