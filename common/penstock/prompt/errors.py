"""What can be wrong with a prompt and with the files that say how to read it."""


class PromptError(ValueError):
    """A request's prompt that cannot become tokens: the client's fault.

    Args:
        message: A sentence that says what to change.
        param: The request field at fault, such as `messages[0].content`.
        code: A word for machines, such as `context_length_exceeded`.
    """

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BundleError(ValueError):
    """Tokenizer or chat template files that cannot be used; the message names the file."""


class BeyondError(Exception):
    """Only Jinja can render this."""
