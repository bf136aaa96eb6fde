"""The request's prompts in tokens and block hashes."""

from penstock.gateway.extproc.passage import Passage
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.load.tokenized import guessed_tokens
from penstock.gateway.picker.state import FleetState


class Tokenise:
    """Asks the prompt library."""

    def __init__(self, state: FleetState, prompts: PromptLibrary) -> None:
        self._state = state
        self._prompts = prompts

    def guess(self, body: bytes) -> int:
        """About how many tokens the prompt of a body has."""
        return guessed_tokens(body, self._state.compiled)

    async def run(self, passage: Passage) -> None:
        """Fills `tokens`, with a guess that says that it is one where they cannot be known."""
        call, replicas = passage.call, self._state.directory.replicas_of(passage.model)
        passage.tokens = await self._prompts.tokenize(
            replicas, passage.path, call.body, passage.body.fields, passage.tenant.name, passage.adapter
        )
