"""A vision tower's cost by its configuration, beside its decoder's. No torch."""

from penstock.engine.models.vision.config import Qwen3Config, QwenConfig, SquareConfig, VisionConfig
from penstock.prompt.image_size import TowerCost


def tower_cost(vision: VisionConfig, flops_per_token: int) -> TowerCost:
    """Of the products with weights, and of the attention, by the pixels of an image. Norms and activations are not counted.

    Args:
        vision: The tower's configuration.
        flops_per_token: The decoder's, of one token.
    """
    match vision:
        case SquareConfig(tower=tower):
            hidden, inner, layers = tower.hidden_size, tower.intermediate_size, tower.num_layers
            weights, merger = 4 * hidden**2 + 2 * hidden * inner, 0.0
            seen, squared = layers * tower.num_patches, 0
        case QwenConfig(tower=tower):
            hidden, inner, layers = tower.hidden_size, tower.intermediate_size, tower.num_layers
            full, square = len(tower.full_layers), tower.merge_size**2
            weights, merger = 4 * hidden**2 + 3 * hidden * inner, square * hidden**2 + hidden * tower.out_size
            seen, squared = (layers - full) * (tower.window_size // tower.patch_size) ** 2, full
        case Qwen3Config(tower=tower):
            hidden, inner, layers = tower.hidden_size, tower.intermediate_size, tower.num_layers
            square, mergers = tower.merge_size**2, 1 + len(tower.deep_layers)
            weights, merger = 4 * hidden**2 + 2 * hidden * inner, mergers * (square * hidden**2 + hidden * tower.out_size)
            seen, squared = 0, layers
        case _:
            raise TypeError(f"{type(vision).__name__} is no tower's")
    patch = tower.patch_size**2
    each = 2 * (layers * weights + merger) + 4 * hidden * seen
    return TowerCost(each / patch / flops_per_token, 4 * hidden * squared / patch**2 / flops_per_token)
