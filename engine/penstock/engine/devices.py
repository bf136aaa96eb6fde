"""The device of an engine, found without torch, since the frontend asks too.

CUDA's driver is queried directly: it respects CUDA_VISIBLE_DEVICES and makes no context. Whether torch can use the device follows
from torch's own record of its build.
"""

import ctypes
import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.engine.config import ConfigError

MIN_CAPABILITY = (8, 0)
"""Compute capability below which there is no arithmetic in bfloat16."""
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…"""
_log = logging.getLogger(__name__)


class CudaDevice(NamedTuple):
    """The first that is visible."""

    name: str
    capability: tuple[int, int]


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Choose the device of the model. `auto`: a CUDA device if one works.

    Raises:
        ConfigError: A CUDA device is requested and none works. The message says why.
    """
    if asked == "cpu":
        return "cpu"
    found = first_cuda_device()
    problem = why_no_cuda(found, torch_cuda())
    if problem is None:
        assert found is not None
        _log.info("device: %s, compute capability %d.%d", found.name, *found.capability)
        return "cuda"
    if asked == "cuda":
        raise ConfigError(f"--device cuda: {problem}")
    if found is not None:
        _log.warning("device: the CPU, although there is a GPU: %s", problem)
    return "cpu"


def why_no_cuda(device: CudaDevice | None, torch_cuda: str | None) -> str | None:
    """Why no model can run on CUDA, if so.

    Args:
        device: What the driver shows.
        torch_cuda: The version of CUDA that torch was built for; None: for none.
    """
    if device is None:
        return "no CUDA device is visible (no driver, no GPU, or CUDA_VISIBLE_DEVICES hides it)"
    if torch_cuda is None:
        return f"torch was built without CUDA, so that it cannot use the {device.name}"
    if device.capability < MIN_CAPABILITY:
        least = ".".join(map(str, MIN_CAPABILITY))
        return f"the {device.name} has compute capability {device.capability[0]}.{device.capability[1]}; {least} is needed"
    return None


def first_cuda_device(library: str = "libcuda.so.1") -> CudaDevice | None:
    """What the driver shows; None where there is no driver, or it shows nothing.

    Args:
        library: The driver's.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return None
    count, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    if driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    name, numbers = ctypes.create_string_buffer(256), [ctypes.c_int(), ctypes.c_int()]
    failed = driver.cuDeviceGetName(name, len(name), device)
    for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return None if failed else CudaDevice(name.value.decode(), (numbers[0].value, numbers[1].value))


def torch_cuda() -> str | None:
    """The version of CUDA that the installed torch was built for; None: for none, or there is no torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b.*= ?'(.+)'$", (Path(spec.origin).parent / "version.py").read_text(), re.MULTILINE)
    return None if found is None else found[1]
