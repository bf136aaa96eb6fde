"""What a build generates: the Envoy protobuf package, and the CPU operations of a wheel for Linux. Hatchling runs it.

An sdist holds the protobuf package, so that a build from it needs no generator.
"""

import importlib
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GeneratedFiles(BuildHookInterface):
    """Adds them to wheels and sdists; an editable install compiles its operations at the first start."""

    def dependencies(self) -> list[str]:
        """The generator, pinned as `make setup` has it, unless the protobuf package is there."""
        if self._protobufs.is_dir():
            return []
        return self._generation.generator()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generates what is missing."""
        if not self._protobufs.is_dir():
            self._generation.generate(self._protobufs)
        if self.target_name == "wheel" and version == "standard" and sys.platform == "linux":
            self._compile(build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what `initialize` compiled."""
        if compiled := build_data.get("penstock_compiled"):
            shutil.rmtree(compiled)

    @property
    def _protobufs(self) -> Path:
        return Path(self.root) / "gateway/penstock/gateway/_pb"

    @property
    def _generation(self) -> ModuleType:
        sys.path.insert(0, str(Path(self.root) / "common"))
        return importlib.import_module("protobufs")

    def _compile(self, build_data: dict[str, Any]) -> None:
        """Adds the operations for every instruction set of this architecture, which makes the wheel one for this platform."""
        sys.path.insert(0, str(Path(self.root) / "kernels"))
        from penstock.kernels.cpu.build import CACHE, COMPILERS, PACKAGED, cached, compile_for
        from penstock.kernels.cpu.isa import ISAS

        compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            self.app.display_warning(
                f"no C++ compiler ({', '.join(COMPILERS)}): the wheel holds no CPU operations, and needs one where it runs"
            )
            return
        build_data["penstock_compiled"] = folder = tempfile.mkdtemp()
        to = PACKAGED.relative_to(Path(self.root) / "kernels")
        for isa in ISAS:
            if isa.machine in (None, platform.machine()):
                try:  # the next build takes them from there: half a minute less
                    library = cached(isa, CACHE.expanduser(), compiler)
                except OSError as error:
                    self.app.display_warning(f"{CACHE} cannot keep the CPU operations: {error}")
                    library = compile_for(isa, Path(folder), compiler)
                build_data["force_include"][str(library)] = str(to / library.name)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
