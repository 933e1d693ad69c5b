"""What leaves the cache of loaded layers, and when.

Nothing does below the high mark. At it, the least recently used go until no more than the low mark is taken: first chunks, which a
store can give again, then whole layers that no person asked for. What a live sandbox has, and what is pinned, stays.
"""

from collections.abc import Sequence

from msgspec import Struct

from dsec.model.loading import LayerCache

__all__ = ["Eviction", "choose_evictions", "taken"]


class Eviction(Struct, frozen=True, kw_only=True):
    """Take the chunks of `layer`, or with `forget` the layer and its names too. `frees`: bytes that this gives, at most."""

    layer: str
    frees: int
    forget: bool = False


def taken(layers: Sequence[LayerCache]) -> int:
    """Bytes on disk that the marks speak of: those of layers that a store can give again."""
    return sum(layer.bytes_here for layer in layers if layer.evictable)


def choose_evictions(layers: Sequence[LayerCache], high: int, low: int) -> list[Eviction]:
    """What is to go, in order, for marks in bytes; none below `high`. Layers used at the same moment go in the order of their digests."""
    held = taken(layers)
    if held < high:
        return []
    free = sorted(
        (layer for layer in layers if layer.evictable and not (layer.live or layer.pinned)),
        key=lambda layer: (layer.used, layer.layer),
    )
    found: list[Eviction] = []
    for layer in free:
        if held > low and layer.data_here > 0:
            found.append(Eviction(layer=layer.layer, frees=layer.data_here))
            held -= layer.data_here
    for layer in free:
        if held > low and not layer.pulled:
            rest = layer.bytes_here - layer.data_here
            found.append(Eviction(layer=layer.layer, frees=rest, forget=True))
            held -= rest
    return found
