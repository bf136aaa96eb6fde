"""What a build generates: the protobuf package. An sdist holds it, so that a build from it needs no generator."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GeneratedFiles(BuildHookInterface):
    """Generates it in a checkout that lacks it."""

    def dependencies(self) -> list[str]:
        """The generator, unless the protobuf package is there."""
        return [] if self._protobufs.is_dir() else self._generation.generator()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generates what is missing."""
        if not self._protobufs.is_dir():
            self._generation.generate(self._protobufs)

    @property
    def _protobufs(self) -> Path:
        return Path(self.root) / "penstock/epp_conformance/_pb"

    @property
    def _generation(self) -> ModuleType:
        """The checkout's module; an sdist has neither it nor a need of it."""
        sys.path.insert(0, str(Path(self.root).parent / "common"))
        return importlib.import_module("protobufs")
