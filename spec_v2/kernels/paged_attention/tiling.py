"""How the work is cut, from host bounds alone: tile sizes, and into how many splits a context falls."""

from dataclasses import dataclass
from functools import cache

import torch

SHARED_MEMORY_BYTES = 227 * 1024  # what one block can have on Hopper
MIN_KEYS_PER_SPLIT = 256  # below that, merging costs more than reading side by side saves
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """One tile: `block_m` pairs of query token and head against `block_n` keys at a time.

    `fused`: the last split of a tile to finish merges the tile; otherwise a second kernel does.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    fused: bool = False


def choose_tiling(pairs: int, key_dim: int, value_dim: int, itemsize: int) -> Tiling:
    """`pairs`: query tokens of a request times query heads of a KV head. Dimensions are powers of two."""
    dim = max(key_dim, value_dim)
    if itemsize == 4:  # no tensor cores: products of fp32 stay exact
        return Tiling(16, 32 if dim <= 128 else 16, 4, 2)
    block_m = min(max(16, 1 << (pairs - 1).bit_length()), 128 if dim <= 256 else 32)
    block_n = 64 if dim <= 128 else 32 if dim <= 256 else 16
    many_registers = block_m * dim >= 128 * 128
    return Tiling(block_m, block_n, 8 if many_registers else 4, 3)


def choose_splits(tiles: int, max_keys: int, num_sms: int) -> int:
    """The fewest splits that keep the device nearly as busy as the best number would.

    `tiles`: tiles of all requests and KV heads. Two blocks run on a multiprocessor at a time, and a last wave that is
    not full leaves some of them idle. A captured graph keeps the number that its bounds gave: requests shorter than
    the bound use as many splits as they have work for, the other blocks return at once.
    """
    places = 2 * num_sms
    most = min(MAX_SPLITS, -(-max_keys // MIN_KEYS_PER_SPLIT), 4 * places // tiles)

    def busy(splits: int) -> float:
        waves = tiles * splits / places
        return waves / -(-tiles * splits // places)

    candidates = range(1, max(most, 1) + 1)
    best = max(map(busy, candidates))
    return next(splits for splits in candidates if busy(splits) >= 0.85 * best)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device. Elsewhere those of an H200, so that the interpreter splits as it would."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
