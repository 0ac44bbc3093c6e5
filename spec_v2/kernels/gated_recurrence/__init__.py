"""A linear recurrence with a matrix as its state, along paths: the gated delta rule, and Mamba-2's without the delta.

A head's state is a matrix `S` of `kd * vd` numbers. A token with query `q`, key `k`, value `v` makes of it

    S = exp(decay) * S
    S = S + k (step * (v - S'k))'     gated delta rule (Yang et al. 2024, arXiv 2412.06464), q and k normed to length 1
    S = S + k (step * v)'             Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): k is B, q is C, step is dt

and says `S'q` (the delta rule divides by the square root of `kd`). A path is a list of tokens in their order: a prompt, a
chain, or a node of a tree with its ancestors before it. Tokens of other branches are not on it, so a node starts from its
parent's state. A path's state stays in registers from its first token to its last, and goes to memory only where it is saved.

Bytes moved: for each path `4 * heads * kd * vd` read, as many written for each save, and its tokens' q, k and v for each
path that they are on.
"""

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import floats
from spec_v2.kernels.gated_recurrence.reference import Saves, TokenInputs, gated_recurrence_reference

__all__ = ["Saves", "TokenInputs", "gated_recurrence"]


def gated_recurrence(
    states: Float[Tensor, "rows heads kd vd"],
    start_rows: Int[Tensor, " p"],
    paths: Int[Tensor, "p l"],
    tokens: TokenInputs,
    *,
    delta: bool,
    outputs: Literal["all", "last", "none"],
    saves: Saves | None = None,
) -> Float[Tensor, "o heads vd"] | None:
    """Walk each path from the state in its start row; -1 in a path is passed over. A path may save to its own start row, but
    not to another's.

    `outputs`: "all" gives one per token, which must be on one path and no other (on none, it gets 0); "last" gives one
    per path, for the token in its last column. Sums in the states' dtype, fp32 or float64, which outputs have too.
    """
    if floats.runs_triton(states):
        from spec_v2.kernels.gated_recurrence.triton_kernel import gated_recurrence_triton

        return gated_recurrence_triton(states, start_rows, paths, tokens, delta, outputs, saves)
    return gated_recurrence_reference(states, start_rows, paths, tokens, delta, outputs, saves)
