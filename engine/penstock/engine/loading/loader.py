"""The sources of a model's weights, and their way to its device."""

import logging
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.engine.config import LoadFormat
from penstock.engine.loading.dummy import load_dummy, stored_dtype
from penstock.engine.loading.progress import show_progress
from penstock.engine.loading.safetensors import Loadable, StoredTensor, check_weights, load_mapped
from penstock.engine.loading.stream import Uploader, stream_weights

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Weights that a model can be filled with."""

    path: Path
    """Folder in Hugging Face's format."""
    format: LoadFormat = "auto"


def check(model: Loadable, source: Source) -> None:
    """Raises the `ConfigError` that `fill` would, having read headers alone."""
    if source.format != "dummy":
        check_weights(model, source.path)


def fill(model: Loadable, source: Source, dtype: torch.dtype, uploader: Uploader | None = None) -> None:
    """Loads every tensor of a model and shows how far it is.

    Args:
        model: Takes each tensor by its name.
        source: Of the weights.
        dtype: Of tensors that are made up, where the model takes it for them.
        uploader: The device where the model is; None: in the host's memory.

    Raises:
        ConfigError: As `check_weights` has it, and nothing has been loaded; or a file changed meanwhile.
    """
    start = time.monotonic()
    device, tensors = torch.device("cpu") if uploader is None else uploader.device, list[StoredTensor]()
    if source.format == "dummy":
        sizes = [stored_dtype(weight, dtype).itemsize * math.prod(weight.shape) for weight in model.weights().values()]
    else:
        tensors = check_weights(model, source.path)
        sizes = [tensor.size for tensor in tensors]
    with show_progress(sum(sizes)) as progress:
        if source.format == "dummy":
            load_dummy(model, dtype, device, progress)
        elif uploader is None:
            load_mapped(model, tensors, progress)
        else:
            stream_weights(model, tensors, uploader, progress)
    seconds, made_up = time.monotonic() - start, " made up (--load-format dummy)" if source.format == "dummy" else ""
    log.info("loaded %d tensors%s, %.1f MB, in %.2f s", len(sizes), made_up, sum(sizes) / 1e6, seconds)
