"""The request's prompts in tokens and block hashes."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api.fleet import Replica
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

    def at_once(self, passage: Passage) -> bool:
        """Fills `tokens`, with a guess that says that it is one where they cannot be known. False: `run` has to."""
        tokens = self._prompts.at_once(*self._asked(passage))
        if tokens is None:
            return False
        passage.tokens = tokens
        return True

    async def run(self, passage: Passage) -> None:
        """As `at_once`, of a prompt that is more work."""
        passage.tokens = await self._prompts.in_thread(*self._asked(passage))

    def _asked(self, passage: Passage) -> tuple[Sequence[Replica], str, bytes, Mapping[str, Any], str, str | None]:
        """What `PromptLibrary.at_once` takes."""
        body, replicas = passage.body.fields, self._state.directory.replicas_of(passage.model)
        return replicas, passage.path, passage.call.body, body, passage.tenant.name, passage.adapter
