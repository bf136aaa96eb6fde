"""Which instruction set is chosen, and what is compiled for it."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.kernels.cpu import build, isa
from penstock.kernels.cpu.isa import ISAS, available, choose
from penstock.kernels.ops import native_ops, ops_for

AVX2 = {"sse2", "avx", "avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
BEST = available()[0]


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", {"sse2"}, ["portable"]),
        ("x86_64", AVX2 - {"fma"}, ["portable"]),
        ("x86_64", AVX2, ["avx2", "portable"]),
        ("x86_64", AVX512, ["avx2", "portable"]),
        ("x86_64", AVX512 | {"avx512_bf16"}, ["avx2", "portable"]),
        ("x86_64", AVX512 | {"avx512_bf16", "avx512_vnni"}, ["avx512_bf16", "avx2", "portable"]),
        ("x86_64", AVX512 | {"avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"}, ["avx512_bf16", "avx2", "portable"]),
        (
            "x86_64",
            AVX512 | {"avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "amx_tile"},
            ["amx", "avx512_bf16", "avx2", "portable"],
        ),
        ("aarch64", {"fp", "asimd"}, ["neon", "portable"]),
        ("aarch64", {"fp", "asimd", "bf16"}, ["neon_bf16", "neon", "portable"]),
        ("riscv64", set(), ["portable"]),
    ],
)
def test_a_cpu_has_what_its_features_say(machine, features, expected):
    assert [found.name for found in available(machine, features)] == expected


def test_the_best_is_chosen_or_less_and_never_more(monkeypatch):
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa, "cpu_features", lambda: frozenset(AVX2))
    assert choose(None).name == "avx2" and choose("portable").name == "portable"
    with pytest.raises(ValueError, match=r"does not have avx512_bf16 \(it has avx2, portable\)"):
        choose("avx512_bf16")


def test_operations_name_their_instruction_set(native):
    for dtype in (torch.float32, torch.bfloat16):
        assert native(dtype).form in {f"native {one.name}" for one in available()}
    for one in available():
        assert ops_for("cpu", torch.float32, one.name).form == f"native {one.name}"
    assert ops_for("cpu", torch.float32).form == f"native {BEST.name}"


def test_a_build_is_kept(native, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "SOURCES", [one for one in build.SOURCES if one.name == "drafts.cpp"])  # a second, not fifteen
    first = build.library(BEST, tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build.library(BEST, tmp_path) == first and first.stat().st_mtime_ns == stamp
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [first]


def test_processes_that_start_together_compile_once(native, monkeypatch, tmp_path):
    compiled = list[Path]()

    def slowly(isa, folder, compiler):
        time.sleep(0.2)
        compiled.append(folder / build.library_name(isa))
        compiled[-1].touch()

    monkeypatch.setattr(build, "compile_for", slowly)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: build.library(BEST, tmp_path), range(3)))
    assert len(compiled) == 1 and found == compiled * 3


def test_a_packaged_build_needs_no_compiler(native, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "PACKAGED", tmp_path)
    made = tmp_path / build.library_name(BEST)
    made.write_bytes(build.library(BEST, build.CACHE.expanduser()).read_bytes())
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert build.library(BEST, tmp_path / "cache") == made
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DCHANGED"))
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.library(BEST, tmp_path / "cache")


def test_a_compilers_complaint_is_passed_on(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "FLAGS", ("-no-such-flag",))
    with pytest.raises(build.BuildError, match="no-such-flag"):
        native_ops(torch.float32, BEST, tmp_path)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.skipif(BEST.machine != "x86_64", reason="the registers of another architecture have other names")
@pytest.mark.parametrize("name", ["avx2", "portable"])
def test_a_build_has_no_instruction_beyond_its_set(native, name):
    """The registers of AVX-512 and of AVX say it."""
    (one,) = [one for one in ISAS if one.name == name]
    listing = subprocess.run(
        ["objdump", "-d", build.library(one, build.CACHE.expanduser())], capture_output=True, text=True, check=True
    ).stdout
    assert "%xmm" in listing
    assert "%zmm" not in listing and "%k1" not in listing and "%xmm16" not in listing
    assert ("%ymm" in listing) == (name == "avx2")
