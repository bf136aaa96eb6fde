"""Which device is chosen, with drivers of our own making."""

import shutil
import subprocess
import sys

import pytest

from penstock.engine import devices
from penstock.engine.config import ConfigError
from penstock.engine.devices import CudaDevice, choose_device, first_cuda_device, torch_cuda

H200, T4 = CudaDevice("NVIDIA H200", (9, 0)), CudaDevice("Tesla T4", (7, 5))
DRIVER = """
int cuInit(unsigned flags) { return %(init)d; }
int cuDeviceGetCount(int *count) { *count = %(count)d; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    const char *from = "NVIDIA H200";
    for (int i = 0; i < size; i++) if (!(name[i] = from[i])) break;
    return device == 7 ? 0 : 101;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
    return 0;
}
"""


@pytest.mark.parametrize(
    ("init", "count", "expected"), [(0, 2, H200), (0, 0, None), (100, 1, None)], ids=["two", "hidden", "no device"]
)
def test_the_driver_is_asked(tmp_path, init, count, expected):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for a driver of our own")
    (tmp_path / "driver.c").write_text(DRIVER % {"init": init, "count": count})
    library = tmp_path / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    assert first_cuda_device(str(library)) == expected


def test_without_a_driver_there_is_no_device():
    assert first_cuda_device("libnosuchdriver.so.1") is None


def test_torch_says_what_it_was_built_for():
    import torch

    assert torch_cuda() == torch.version.cuda


@pytest.mark.parametrize(
    ("device", "built", "words"),
    [
        (None, "13.0", "no CUDA device is visible"),
        (H200, None, "torch was built without CUDA"),
        (T4, "13.0", r"Tesla T4 has compute capability 7\.5; 8\.0 is needed"),
    ],
)
def test_what_does_not_serve_is_refused_by_name_or_passed_over(monkeypatch, device, built, words):
    monkeypatch.setattr(devices, "first_cuda_device", lambda: device)
    monkeypatch.setattr(devices, "torch_cuda", lambda: built)
    with pytest.raises(ConfigError, match=f"--device cuda: .*{words}"):
        choose_device("cuda")
    assert choose_device("auto") == choose_device("cpu") == "cpu"


def test_a_gpu_that_serves_is_taken(monkeypatch):
    monkeypatch.setattr(devices, "first_cuda_device", lambda: H200)
    monkeypatch.setattr(devices, "torch_cuda", lambda: "13.0")
    assert [choose_device(asked) for asked in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


def test_choosing_imports_no_torch():
    script = "import sys; from penstock.engine.devices import choose_device; choose_device('auto'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "False"
