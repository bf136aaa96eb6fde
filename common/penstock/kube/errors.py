"""What commands catch. Apart from the client, whose import takes a second."""


class NoApiServer(Exception):
    """No API server is configured. The message lists the places that were searched."""
