"""Other engines on the benchmark's model, each in an environment of its own."""
