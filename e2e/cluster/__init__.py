"""A Kubernetes cluster for tests: the real control plane in a network namespace, and nodes that run pods as processes."""
