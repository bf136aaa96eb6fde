"""Graphs of a CUDA device."""

import logging

import torch

log = logging.getLogger(__name__)


class CudaGraphs:
    """See `GraphRuntime`. Must be used within `main_stream`: the default stream cannot be captured."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None

    def new_pool(self) -> object:
        """See GraphRuntime."""
        return torch.cuda.graph_pool_handle()

    def begin(self, pool: object) -> None:
        """See GraphRuntime. Other threads may go on allocating; in this one whatever cannot be captured is an error."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # pyright: ignore[reportArgumentType]

    def end(self) -> torch.cuda.CUDAGraph:
        """See GraphRuntime."""
        graph, self._graph = self._graph, None
        if graph is None:
            raise RuntimeError("no capture is under way")
        graph.capture_end()
        return graph

    def abandon(self) -> None:
        """See GraphRuntime."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError as error:  # the failure that led here, told once more
            log.debug("an abandoned capture: %s", error)

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """See GraphRuntime."""
        return weak_tensor(tensor)


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address that does not keep its memory from being taken again."""
    storage = tensor.untyped_storage()
    # As torch's own CUDA graph trees have it; there is no public way for every dtype.
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())
