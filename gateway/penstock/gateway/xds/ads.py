"""Where Envoy is told to get a resource that another one names."""

from penstock.gateway._pb.envoy.config.core.v3.config_source_pb2 import AggregatedConfigSource, ApiVersion, ConfigSource

ADS = ConfigSource(ads=AggregatedConfigSource(), resource_api_version=ApiVersion.V3)
"""The stream on which it was named."""
