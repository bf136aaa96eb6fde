"""The compiled operations for aarch64: built by a cross compiler, run under an emulator, and held to this machine's."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from penstock.kernels.cpu import build
from penstock.kernels.cpu.isa import ISAS

CROSS, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"
DRIVER = Path(__file__).with_name("every_op.cpp")
PORTABLE = next(isa for isa in ISAS if isa.name == "portable")

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which(CROSS) and shutil.which(EMULATOR) and shutil.which("g++")),
        reason="no cross compiler or no emulator: apt-get install g++-aarch64-linux-gnu qemu-user-static",
    ),
    pytest.mark.slow,
]


def outputs(library: Path, folder: Path, compiler: str, *emulator: str) -> list[tuple[str, float]]:
    """What the driver prints: the operation and dtype of each number."""
    program = folder / "every_op"
    subprocess.run([compiler, "-std=c++17", "-O1", DRIVER, library, f"-Wl,-rpath,{library.parent}", "-o", program], check=True)
    printed = subprocess.run([*emulator, program], capture_output=True, text=True, check=True).stdout
    lines = [line.rsplit(" ", 1) for line in printed.splitlines()]
    return [(name, float(value)) for name, value in lines]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return outputs(build.library(PORTABLE, build.CACHE.expanduser()), tmp_path_factory.mktemp("here"), "g++")


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.machine == "aarch64"], ids=lambda isa: isa.name)
def test_aarch64_computes_what_this_machine_does(isa, here, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", [flag for flag in build.FLAGS if flag != "-O3"])  # five seconds, not thirty
    there = outputs(build.compile_for(isa, tmp_path, CROSS), tmp_path, CROSS, EMULATOR, "-L", ROOT)
    assert [name for name, _ in there] == [name for name, _ in here] and len(here) > 10_000
    for name in sorted({name for name, _ in here}):
        ours, theirs = (np.array([value for which, value in found if which == name]) for found in (here, there))
        tolerance = 1e-5 if name.endswith("0") else 2**-6
        np.testing.assert_allclose(theirs, ours, rtol=tolerance, atol=tolerance * np.abs(ours).max(), err_msg=name)
        assert np.abs(ours).max() > 0.01, name
