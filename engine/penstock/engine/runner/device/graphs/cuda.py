"""Graphs of a CUDA device."""

import logging

import torch

log = logging.getLogger(__name__)


class CudaPool:
    """Memory that graphs share, and all graphs that were begun in it, also those whose capture failed.

    The end of a `CUDAGraph` frees the cuBLAS workspace of the stream that captured it. Every other graph of this stream has that
    workspace's address in its matrix products, so no graph may end before all of them do.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.graphs: list[torch.cuda.CUDAGraph] = []


class CudaGraphs:
    """See `GraphRuntime`. Must be used within `main_stream`: the default stream cannot be captured."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None

    def new_pool(self) -> CudaPool:
        """Memory that graphs share which are never replayed at once, and all graphs begun in it."""
        return CudaPool()

    def begin(self, pool: object) -> None:
        """See GraphRuntime. Other threads may go on allocating; in this one whatever cannot be captured is an error."""
        assert isinstance(pool, CudaPool)
        self._graph = torch.cuda.CUDAGraph()
        pool.graphs.append(self._graph)
        self._graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        """What was launched since `begin`."""
        graph, self._graph = self._graph, None
        if graph is None:
            raise RuntimeError("no capture is under way")
        graph.capture_end()
        return graph

    def abandon(self) -> None:
        """Ends a capture that has failed, if one is under way."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError as error:  # the failure that led here, told once more
            log.debug("an abandoned capture: %s", error)

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without owning it: a tensor of a graph's pool that later captures may take again."""
        return weak_tensor(tensor)


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address that does not keep its memory from being taken again."""
    storage = tensor.untyped_storage()
    # As torch's own CUDA graph trees have it; there is no public way for every dtype.
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())
