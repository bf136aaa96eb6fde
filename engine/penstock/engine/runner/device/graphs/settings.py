"""CUDA graphs as people ask for them."""

from collections.abc import Sequence

from penstock.engine.config import ConfigError, CudagraphMode, GraphConfig
from penstock.engine.runner.device.graphs.sizes import DEFAULT_MAX_CAPTURE_SIZE, default_capture_sizes


def graph_config(
    *,
    cuda: bool,
    enforce_eager: bool,
    mode: CudagraphMode | None,
    sizes: Sequence[int] | None,
    largest: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> GraphConfig:
    """What is captured.

    Args:
        cuda: Whether the device has graphs.
        enforce_eager: Nothing is captured.
        mode: None: the default.
        sizes: None: the default ones.
        largest: Of the default sizes; None: every step of decodes has a graph, and mixed steps up to
            `DEFAULT_MAX_CAPTURE_SIZE` tokens.
        max_num_seqs: Requests of a step at most.
        max_num_batched_tokens: Tokens of a step at most.

    Raises:
        ConfigError: The settings contradict each other, or the device has no graphs.
    """
    flags = {"--cudagraph-mode": mode, "--cudagraph-capture-sizes": sizes, "--max-cudagraph-capture-size": largest}
    given = [flag for flag, value in flags.items() if value not in (None, "NONE")]
    if given and (not cuda or enforce_eager or mode == "NONE"):
        excluded = "--device cpu has no graphs" if not cuda else "--enforce-eager" if enforce_eager else "--cudagraph-mode NONE"
        raise ConfigError(f"{given[0]} and {excluded}: choose one")
    if not cuda or enforce_eager or mode == "NONE":
        return GraphConfig()
    most = max(max_num_batched_tokens, max_num_seqs)
    if sizes is None:
        default = min(max(DEFAULT_MAX_CAPTURE_SIZE, max_num_seqs), most)
        chosen = default_capture_sizes(min(largest, most) if largest is not None else default)
    else:
        chosen = tuple(sorted(set(sizes)))
        if not chosen or chosen[0] < 1:
            raise ConfigError(f"--cudagraph-capture-sizes {' '.join(map(str, sizes))}: sizes are at least 1, and there is one")
        if largest not in (None, chosen[-1]):
            raise ConfigError(
                f"--max-cudagraph-capture-size {largest} is not the largest of --cudagraph-capture-sizes, {chosen[-1]}"
            )
        if chosen[-1] > most:
            raise ConfigError(
                f"--cudagraph-capture-sizes {chosen[-1]} is beyond --max-num-batched-tokens {max_num_batched_tokens}"
            )
    return GraphConfig(mode=mode or "FULL_AND_PIECEWISE", capture_sizes=chosen)
