"""Moves KV pages between replicas: a prefill replica lends them, a decode replica reads them."""
