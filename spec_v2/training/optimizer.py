"""AdamW on full-precision copies of the weights, and its state in files that are small enough to move anywhere."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

PIECE_BYTES = 14 << 20
BETAS = (0.9, 0.95)


def lr_at(progress: float, step: int, peak: float, warmup_steps: int, floor: float = 0.02) -> float:
    """Cosine from `peak` to `floor * peak` over `progress` 0..1, after a linear warm-up."""
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return peak * warm * (floor + (1 - floor) * cosine)


class MasterAdamW:
    """Gradients arrive in the weights' dtype; moments and master weights are kept in fp32 (fp64 for fp64 weights).

    `ema`: also keep an exponential average of the master weights with this decay, 0 for none; `averaged` swaps it in.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, weight_decay: float, clip: float, ema: float = 0.0
    ) -> None:
        self.parameters = dict(parameters)
        self.clip, self.ema = clip, ema
        wide = [p.detach().to(_wide(p.dtype), copy=True) for p in self.parameters.values()]
        self.masters: list[Tensor] = [nn.Parameter(w) for w in wide]
        self.averages = [w.clone() for w in wide] if ema else []
        matrices = [m for m in self.masters if m.dim() > 1]
        others = [m for m in self.masters if m.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = all(m.is_cuda for m in self.masters)
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=fused)

    def step(self, lr: float) -> Float[Tensor, ""]:
        """Take a step and forget the gradients. Returns their norm before clipping."""
        weights: list[Tensor] = list(self.parameters.values())
        for master, weight in zip(self.masters, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.to(master.dtype)
            weight.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, self.clip)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        with torch.no_grad():
            if self.ema:
                torch._foreach_lerp_(self.averages, self.masters, 1 - self.ema)
            torch._foreach_copy_(weights, self.masters)
        return norm

    @torch.no_grad()
    def use(self, *, averages: bool) -> None:
        """Put the averages, or the master weights again, into the model."""
        source = self.averages if averages and self.ema else self.masters
        torch._foreach_copy_(list(self.parameters.values()), source)

    # -- files -----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the state as pieces of at most 15 MiB. The folder's older pieces are replaced."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in self._flat().items():
            flat = torch.cat([t.detach().flatten() for t in tensors]).cpu()
            for number, piece in enumerate(flat.split(PIECE_BYTES // flat.element_size())):
                save_file({name: piece.contiguous()}, folder / f"{name}-{number:03d}.safetensors")

    @torch.no_grad()
    def load(self, folder: Path, step: int) -> None:
        """Go on from what `save` wrote after `step` steps. Raises ValueError where it belongs to another model."""
        from safetensors.torch import load_file

        for master in self.masters:  # AdamW makes its moments at the first step: make them now
            moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            count = torch.tensor(float(step), device=master.device if master.is_cuda else "cpu")
            self.adamw.state[master] = {"step": count, **moments}
        for name, tensors in self._flat().items():
            pieces = [load_file(path)[name] for path in sorted(folder.glob(f"{name}-*.safetensors"))]
            total = sum(t.numel() for t in tensors)
            if sum(p.numel() for p in pieces) != total:
                raise ValueError(
                    f"--resume: {folder} does not hold {total} numbers of {name}; it belongs to another model or "
                    "setting, so leave --resume out or choose another --out"
                )
            parts = torch.cat(pieces).split([t.numel() for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        self.use(averages=False)

    def _flat(self) -> dict[str, list[Tensor]]:
        state = self.adamw.state
        named: dict[str, list[Tensor]] = {"master": self.masters}
        if state:
            named |= {name: [state[m][name] for m in self.masters] for name in ("exp_avg", "exp_avg_sq")}
        if self.ema:
            named["average"] = self.averages
        return named


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
