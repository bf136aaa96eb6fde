"""Compile grammars, each with the library that its request asks for."""

from penstock.engine.config import ModelConfig
from penstock.engine.core.grammar.guidance import Guidance
from penstock.engine.core.grammar.libraries import Library, Prototype
from penstock.engine.core.grammar.xgrammar import Xgrammar
from penstock.engine.grammar import Grammar, GrammarBackend


class Compiler:
    """Compiles grammars for one model; safe to call from several threads.

    Args:
        model: Its tokenizer, stop tokens and number of logits count.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.eos_token_ids = model.eos_token_ids
        guidance = Guidance(model)
        self._settings = model.grammars
        self._libraries: dict[GrammarBackend, Library] = {"guidance": guidance, "xgrammar": Xgrammar(model, guidance)}

    def prepare(self) -> None:
        """Imports the library of requests that name none, if that takes long; raises `GrammarsUnavailable`."""
        if self._settings.backend != "guidance":
            self._libraries[self._settings.backend].prepare()

    def compile(self, grammar: Grammar) -> Prototype:
        """Compiles a grammar with its library; raises what `Library.compile` says."""
        return self._libraries[grammar.backend].compile(grammar)

    def close(self) -> None:
        """Ends what runs beside this process."""
        for library in self._libraries.values():
            library.close()
