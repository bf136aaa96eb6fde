"""The dashboards, on their way to a Grafana. `json` leads to those of `manifests/monitoring`, and is part of the distribution."""
