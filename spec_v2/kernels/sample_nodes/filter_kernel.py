"""What top-k, top-p and min-p keep of each row, without a sort.

What is kept are the best tokens of a row: everything above some number, and of the tokens that equal it the first few. The
number is found digit by digit, sixteen ways at a time (`_report_digits`). In each round every block reports how many of
its tokens have each next digit and what they weigh; the programs of the next round add that up, each for itself, and go on
from the digit where the limit is reached. A row without the filter drops out at once. First top-k is found by count, then
top-p by weight among what top-k left; min-p compares a weight with the largest one and needs no search.

A number is its order key: an integer of 16, 32 or 64 bits, as many as the dtype has, so 4, 8 or 16 rounds.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import next_power_of_2
from spec_v2.kernels.top_k.triton_kernel import order_key

NEVER = tl.constexpr(float("inf"))  # the limit of a row that a filter does not concern
LEAST = tl.constexpr(-0x8000000000000000)  # below every key
PART = 512  # tokens that are put into their digits at once


@triton.jit
@no_type_check
def weigh(x, row_max, temperature, LOGITS: tl.constexpr):
    """Weights of a row's numbers: themselves, or exp of logits at a temperature, the largest weighing 1."""
    if LOGITS:
        x = tl.exp((x - row_max) / tl.where(temperature > 0, temperature, 1.0))
    return x


@triton.jit
@no_type_check
def _number_of(key, KEY_BITS: tl.constexpr, NUMBER: tl.constexpr, WIDE: tl.constexpr):
    """The number that has this order key."""
    if KEY_BITS == 64:
        number = (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    elif KEY_BITS == 32:
        key = key.to(tl.int32)
        number = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        key = key.to(tl.int32)
        number = (key ^ ((key >> 31) & 0x7FFF)).to(tl.int16).to(NUMBER, bitcast=True)
    return number.to(WIDE)


@triton.jit
@no_type_check
def _add_reports(
    counts_ptr,
    masses_ptr,
    base,
    count,
    mass,
    limit,
    row,
    num_blocks,
    BLOCKS: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """The digit where the limit is reached, on top of `base`, and what lies above it: (key, count, mass)."""
    d = tl.arange(0, 16)
    b = tl.arange(0, BLOCKS)
    at = (row * num_blocks + b[:, None]) * 16 + d[None, :]
    counts = tl.sum(tl.load(counts_ptr + at, mask=(b < num_blocks)[:, None], other=0.0), 0)
    masses = tl.sum(tl.load(masses_ptr + at, mask=(b < num_blocks)[:, None], other=0.0), 0)
    if BY_COUNT:
        measure, start = counts, count
    else:
        measure, start = masses, mass
    above = start + tl.sum(tl.where(d[:, None] < d[None, :], measure[None, :], 0.0), 1)
    # the least digit that the limit is not reached above of: the digits below it are not needed any more
    digit = tl.min(tl.where(above < limit, d, 15), 0)
    count += tl.sum(tl.where(d > digit, counts, 0.0), 0)
    mass += tl.sum(tl.where(d > digit, masses, 0.0), 0)
    return base + digit, count, mass


@triton.jit(do_not_specialize=["round"])
@no_type_check
def _report_digits(
    values_ptr,  # [r, v], any strides
    temperatures_ptr,  # [b], read with LOGITS
    row_max_ptr,  # [r]
    limit_ptr,  # [r]
    base_ptr,  # [2, r]: the key's digits so far, in turns: a round reads one and writes the other
    count_ptr,  # [2, r]: tokens above
    mass_ptr,  # [2, r]: their weight
    counts_ptr,  # [2, r, blocks, 16]: the reports
    masses_ptr,  # [2, r, blocks, 16]
    stride_r,
    stride_v,
    rows_per_request,
    V,
    num_blocks,
    round,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
    KEY_BITS: tl.constexpr,
    LOGITS: tl.constexpr,
    WIDE: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    block = tl.program_id(1)
    limit = tl.load(limit_ptr + row)
    if limit < NEVER:
        mine = round % 2
        earlier = 1 - mine
        base = tl.load(base_ptr + earlier * num_rows + row)
        count = tl.load(count_ptr + earlier * num_rows + row)
        mass = tl.load(mass_ptr + earlier * num_rows + row)
        reports = earlier * num_rows * num_blocks * 16
        if round > 0:
            base, count, mass = _add_reports(
                counts_ptr + reports,
                masses_ptr + reports,
                base,
                count,
                mass,
                limit,
                row,
                num_blocks,
                BLOCKS,
                BY_COUNT,
            )
            base *= 16
        if block == 0:
            tl.store(base_ptr + mine * num_rows + row, base)
            tl.store(count_ptr + mine * num_rows + row, count)
            tl.store(mass_ptr + mine * num_rows + row, mass)

        row_max = tl.load(row_max_ptr + row)
        temperature = 1.0
        if LOGITS:
            temperature = tl.load(temperatures_ptr + row // rows_per_request).to(WIDE)
        shift = KEY_BITS - 4 * (round + 1)
        d = tl.arange(0, 16)
        counts = tl.zeros([PART, 16], WIDE)
        masses = tl.zeros([PART, 16], WIDE)
        for start in range(0, BLOCK, PART):
            ids = block * BLOCK + start + tl.arange(0, PART)
            x = tl.load(values_ptr + row * stride_r + ids.to(tl.int64) * stride_v, mask=ids < V, other=0.0)
            digit = (order_key(x) >> shift) - base  # outside of 0..15 where an earlier digit differs
            has = (digit[:, None] == d[None, :]) & (ids < V)[:, None]
            weights = weigh(x.to(WIDE), row_max, temperature, LOGITS)
            counts += has.to(WIDE)
            masses += tl.where(has, weights[:, None], 0.0)
        out = ((mine * num_rows + row) * num_blocks + block) * 16 + d
        tl.store(counts_ptr + out, tl.sum(counts, 0))
        tl.store(masses_ptr + out, tl.sum(masses, 0))


@triton.jit
@no_type_check
def _settle(
    temperatures_ptr,  # [b], read with LOGITS
    top_ks_ptr,  # [b]
    top_ps_ptr,  # [b]
    min_ps_ptr,  # [b]
    block_max_ptr,  # [r, blocks], read in phase 0
    block_sum_ptr,  # [r, blocks], read in phase 0: the block's largest logit weighs 1
    row_max_ptr,  # [r], out of phase 0
    total_ptr,  # [r], out of phase 0
    limit_ptr,  # [r], out of phases 0 and 1
    base_ptr,  # [2, r]
    count_ptr,  # [2, r]
    mass_ptr,  # [2, r]
    counts_ptr,  # [2, r, blocks, 16]
    masses_ptr,  # [2, r, blocks, 16]
    kept_key_ptr,  # [r], out of phases 1 and 2: everything above it is kept
    kept_ties_ptr,  # [r], out of phases 1 and 2: and so many that equal it
    tie_weight_ptr,  # [r], out of phase 2
    min_weight_ptr,  # [r], out of phase 2
    rows_per_request,
    V,
    num_blocks,
    BLOCKS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUMBER: tl.constexpr,
    LOGITS: tl.constexpr,
    WIDE: tl.constexpr,
    PHASE: tl.constexpr,  # 0 before the search for top-k, 1 between the two, 2 after the search for top-p
):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    request = row // rows_per_request
    temperature = 1.0
    if LOGITS:
        temperature = tl.load(temperatures_ptr + request).to(WIDE)

    if PHASE == 0:
        b = tl.arange(0, BLOCKS)
        at = row * num_blocks + b
        block_max = tl.load(block_max_ptr + at, mask=b < num_blocks, other=-float("inf"))
        sums = tl.load(block_sum_ptr + at, mask=b < num_blocks, other=0.0)
        row_max = tl.max(block_max, 0)
        if LOGITS:
            sums = tl.where(sums > 0, sums * weigh(block_max, row_max, temperature, LOGITS), sums)
        tl.store(row_max_ptr + row, row_max)
        tl.store(total_ptr + row, tl.sum(sums, 0))
        top_k = tl.load(top_ks_ptr + request)
        tl.store(limit_ptr + row, tl.where(top_k < V, top_k.to(WIDE), NEVER))
    else:
        row_max = tl.load(row_max_ptr + row)
        limit = tl.load(limit_ptr + row)
        last: tl.constexpr = (KEY_BITS // 4 - 1) % 2  # whose turn the last round was
        state = last * num_rows + row
        reports = last * num_rows * num_blocks * 16
        key, ties, kept = LEAST, 0.0, tl.load(total_ptr + row)
        key = key + tl.zeros([], tl.int64)
        ties = ties + tl.zeros([], WIDE)
        if limit < NEVER:
            key, count, mass = _add_reports(
                counts_ptr + reports, masses_ptr + reports, tl.load(base_ptr + state), tl.load(count_ptr + state),
                tl.load(mass_ptr + state), limit, row, num_blocks, BLOCKS, PHASE == 1,
            )  # fmt: skip
            weight = weigh(_number_of(key, KEY_BITS, NUMBER, WIDE), row_max, temperature, LOGITS)
            if PHASE == 1:
                ties = limit - count
                kept = mass + ties * weight
            else:
                # the least number of ties with which the limit is reached; a quotient may be rounded to its neighbour
                ties = tl.where(weight > 0, tl.ceil((limit - mass) / weight), NEVER)
                ties = tl.where(mass + (ties - 1) * weight >= limit, ties - 1, ties)
                ties = tl.where(mass + ties * weight < limit, ties + 1, ties)
        if PHASE == 1:
            top_p = tl.load(top_ps_ptr + request).to(WIDE)
            tl.store(limit_ptr + row, tl.where(top_p < 1, top_p * kept, NEVER))
        else:
            # top-p searched among all tokens that equal top-k's last one, of which top-k left the first few
            kept_key = tl.load(kept_key_ptr + row)
            kept_ties = tl.load(kept_ties_ptr + row)
            ties = tl.where(
                key > kept_key, ties, tl.where(key == kept_key, tl.minimum(ties, kept_ties), kept_ties)
            )
            key = tl.maximum(key, kept_key)
            weight = weigh(_number_of(key, KEY_BITS, NUMBER, WIDE), row_max, temperature, LOGITS)
            min_weight = tl.load(min_ps_ptr + request).to(WIDE) * weigh(row_max, row_max, temperature, LOGITS)
            tl.store(min_weight_ptr + row, min_weight)
            tl.store(tie_weight_ptr + row, tl.where((ties > 0) & (weight >= min_weight), weight, 0.0))
        tl.store(kept_key_ptr + row, key)
        tl.store(kept_ties_ptr + row, ties)

    if PHASE < 2:
        # what the first round of a search reads: the leading digit is signed
        tl.store(base_ptr + num_rows + row, -8)
        tl.store(count_ptr + num_rows + row, 0.0)
        tl.store(mass_ptr + num_rows + row, 0.0)


@triton.jit
@no_type_check
def _weigh_kept(
    values_ptr,  # [r, v], any strides
    temperatures_ptr,  # [b], read with LOGITS
    row_max_ptr,  # [r]
    kept_key_ptr,  # [r]
    min_weight_ptr,  # [r]
    block_sum_ptr,  # [r, blocks], out: of the weights above the key
    block_ties_ptr,  # [r, blocks], out: tokens that equal it
    stride_r,
    stride_v,
    rows_per_request,
    V,
    num_blocks,
    BLOCK: tl.constexpr,
    LOGITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = 1.0
    if LOGITS:
        temperature = tl.load(temperatures_ptr + row // rows_per_request).to(WIDE)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values_ptr + row * stride_r + ids.to(tl.int64) * stride_v, mask=ids < V, other=0.0)
    key = order_key(x)
    kept_key = tl.load(kept_key_ptr + row)
    weights = weigh(x.to(WIDE), tl.load(row_max_ptr + row), temperature, LOGITS)
    keep = (key > kept_key) & (ids < V) & (weights >= tl.load(min_weight_ptr + row))
    out = row * num_blocks + block
    tl.store(block_sum_ptr + out, tl.sum(tl.where(keep, weights, 0.0), 0))
    tl.store(block_ties_ptr + out, tl.sum(((key == kept_key) & (ids < V)).to(tl.int32), 0))


@dataclass(frozen=True, slots=True)
class Kept:
    """What a filter leaves of each row: everything above `key` that weighs `min_weight`, and the first `ties` equal to it.

    `block_sums`, `block_ties`: per block, the weight above the key, and how many tokens equal it.
    """

    row_max: Tensor
    key: Tensor
    ties: Tensor
    tie_weight: Tensor
    min_weight: Tensor
    block_sums: Tensor
    block_ties: Tensor


def filter_blocks(
    values: Tensor,
    temperatures: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    block_max: Tensor,
    block_sum: Tensor,
    shape: tuple[int, ...],
    flags: dict[str, Any],
) -> Kept:
    """`filters`: top-k, top-p and min-p of each request. `shape`, `flags`: what all kernels of a sample share."""
    r, num_blocks = block_max.shape
    wide, device = block_max.dtype, values.device
    row_max, total, limit, ties, tie_weight, min_weight = torch.empty(6, r, dtype=wide, device=device)
    key = torch.empty(r, dtype=torch.long, device=device)
    base = torch.empty(2, r, dtype=torch.long, device=device)
    above = torch.empty(2, 2, r, dtype=wide, device=device)
    reports = torch.empty(2, 2, r, num_blocks, 16, dtype=wide, device=device)
    block_sums = torch.empty(r, num_blocks, dtype=wide, device=device)
    block_ties = torch.empty(r, num_blocks, dtype=torch.int32, device=device)

    key_bits = values.element_size() * 8
    blocks = next_power_of_2(num_blocks)
    number = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(values.dtype, tl.float32)
    block, logits, fp = flags["BLOCK"], flags["LOGITS"], flags["WIDE"]

    def settle(phase: int) -> None:
        _settle[(r,)](
            temperatures, *filters, block_max, block_sum, row_max, total, limit, base, *above, *reports,
            key, ties, tie_weight, min_weight, *shape[2:],
            BLOCKS=blocks, KEY_BITS=key_bits, NUMBER=number, LOGITS=logits, WIDE=fp, PHASE=phase,
        )  # fmt: skip

    def search(by_count: bool) -> None:
        for step in range(key_bits // 4):
            _report_digits[(r, num_blocks)](
                values, temperatures, row_max, limit, base, *above, *reports, *shape, step,
                BLOCKS=blocks, PART=min(PART, block), KEY_BITS=key_bits, BY_COUNT=by_count, **flags,
            )  # fmt: skip

    settle(0)
    search(by_count=True)
    settle(1)
    search(by_count=False)
    settle(2)
    _weigh_kept[(r, num_blocks)](
        values, temperatures, row_max, key, min_weight, block_sums, block_ties, *shape, **flags
    )
    return Kept(row_max, key, ties, tie_weight, min_weight, block_sums, block_ties)
