"""The gateway's commands."""


def envoy(argv: list[str]) -> int:
    """Run Envoy under a gateway: penstock envoy --xds HOST:PORT."""
    from penstock.gateway.envoy import main

    return main(argv)
