"""One tap after the other, oldest first."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def causal_conv_reference(
    x: Float[Tensor, "tokens c"],
    windows: Float[Tensor, "rows before c"],
    rows: Int[Tensor, " t"],
    taps: Int[Tensor, "t k"],
    weight: Float[Tensor, "c k"],
    bias: Float[Tensor, " c"] | None,
    silu: bool,
) -> Float[Tensor, "t c"]:
    """The sum starts at the bias."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros(len(taps), x.shape[1], dtype=wide, device=x.device)
    if bias is not None:
        total = total + bias.to(wide)
    for j in range(taps.shape[1]):
        total = total + _inputs(x, windows, rows, taps[:, j]).to(wide) * weight[:, j].to(wide)
    out = total.to(x.dtype)
    return F.silu(out) if silu else out


def save_windows_reference(
    x: Float[Tensor, "tokens c"],
    windows: Float[Tensor, "rows before c"],
    start_rows: Int[Tensor, " p"],
    taps: Int[Tensor, "t k"],
    save_tokens: Int[Tensor, "p s"],
    save_rows: Int[Tensor, "p s"],
) -> None:
    """Everything is read before anything is written. What goes nowhere goes to row 0, as what is there already."""
    newest = taps[save_tokens.flatten().clamp(min=0), 1:]  # [p * s, k - 1]
    from_rows = start_rows.repeat_interleave(save_tokens.shape[1])
    columns = [_inputs(x, windows, from_rows, newest[:, j]) for j in range(newest.shape[1])]
    targets = save_rows.flatten()
    saved = torch.where(targets[:, None, None] > 0, torch.stack(columns, 1), windows[:1])
    windows.index_copy_(0, targets, saved.to(windows.dtype))


def _inputs(
    x: Float[Tensor, "tokens c"],
    windows: Float[Tensor, "rows before c"],
    rows: Int[Tensor, " t"],
    taps: Int[Tensor, " t"],
) -> Float[Tensor, "t c"]:
    width = windows.shape[1]
    before = windows[rows, (width + taps).clamp(0, width - 1)]
    return torch.where((taps >= 0)[:, None], x[taps.clamp(min=0)], before)
