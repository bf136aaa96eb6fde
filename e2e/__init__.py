"""Whole-system tests against a real Kubernetes control plane and a real Envoy."""
