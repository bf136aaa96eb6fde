"""Dashboards, recording rules and alerts, from which `make monitoring` writes `manifests/monitoring`."""
