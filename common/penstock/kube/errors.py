"""What commands catch. Apart from the client, whose import takes a second."""


class NoApiServer(Exception):
    """No way to an API server is configured; the message says where one was looked for."""
