"""What the frozen target says about a batch, computed when it is needed: features of 20M tokens would fill 90 GB.

Inference reads the same: the hidden states after the last norm, or the inputs of three layers side by side.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Captured:
    """`hidden`: after the target's last norm, what its LM head reads. `aux`: inputs of the aux layers, width 0 if none.
    `kv`: (keys, values) `[b, kv_heads, t, head_dim]` of the layers that were asked for."""

    hidden: Float[Tensor, "b t h"]
    aux: Float[Tensor, "b t a"]
    kv: dict[int, tuple[Tensor, Tensor]]


class Target:
    """A frozen causal LM that is run densely over padded batches. `close` gives it back as it was.

    Raises ValueError where its logits are not its LM head over the hidden states, as soft-capped or scaled ones are.
    """

    def __init__(self, model: Any, aux_layers: tuple[int, ...] = (), kv_layers: tuple[int, ...] = ()) -> None:
        self.model = model.eval()
        self.kv_layers = kv_layers
        self.vocab_size = int(model.config.vocab_size)
        self._own_attention = model.config._attn_implementation
        if model._supports_sdpa:
            model.set_attn_implementation("sdpa")
        self._aux: list[Tensor] = []
        layers = model.get_decoder().layers
        self._hooks = [
            layers[index].register_forward_pre_hook(self._keep_aux, with_kwargs=True) for index in aux_layers
        ]
        try:
            self._check_readout()
        except BaseException:
            self.close()
            raise

    @torch.no_grad()
    def __call__(self, tokens: Int[Tensor, "b t"]) -> Captured:
        """One forward. Padding on the right is seen by nothing before it."""
        self._aux.clear()
        decoder, cache = self.model.get_decoder(), _empty_cache() if self.kv_layers else None
        # its older name is deprecated in newer releases of transformers
        name = "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"
        out = decoder(input_ids=tokens, use_cache=cache is not None, **{name: cache})
        hidden = out.last_hidden_state
        aux = torch.cat(self._aux, -1) if self._aux else hidden[..., :0]
        self._aux.clear()
        kv = {i: (cache.layers[i].keys, cache.layers[i].values) for i in self.kv_layers} if cache else {}
        return Captured(hidden, aux, kv)

    @torch.no_grad()
    def probs(
        self, hidden: Float[Tensor, "r h"], vocabulary: Int[Tensor, " v"] | None = None
    ) -> Float[Tensor, "r v"]:
        """The target's distribution, in its dtype; over `vocabulary` alone it is renormalised."""
        weight = self.model.get_output_embeddings().weight
        logits = hidden @ (weight if vocabulary is None else weight[vocabulary]).T
        bias = self.model.get_output_embeddings().bias
        if bias is not None:
            logits = logits + (bias if vocabulary is None else bias[vocabulary])
        return logits.softmax(-1)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Remove the hooks and give the model its own attention back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.model.set_attn_implementation(self._own_attention)

    def _keep_aux(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._aux.append(args[0] if args else kwargs["hidden_states"])

    @torch.no_grad()
    def _check_readout(self) -> None:
        tokens = torch.arange(4, device=self.model.device)[None] % self.vocab_size
        captured = self(tokens)
        mine, own = (
            self.probs(captured.hidden[0]),
            self.model(input_ids=tokens, use_cache=False).logits[0].softmax(-1),
        )
        if not torch.allclose(mine.float(), own.float(), atol=0.02):
            raise ValueError(
                f"model_path={type(self.model).__name__}: its logits are more than its LM head over its hidden states "
                "(soft-capped or scaled), which training does not know; use another target"
            )


def _empty_cache() -> Any:
    """transformers' own; made without a config it forgets nothing, whatever the model's sliding window."""
    from transformers import DynamicCache

    return DynamicCache()


def with_fused_norms(model: nn.Module) -> nn.Module:
    """Replace RMS norms by torch's own, which take one kernel instead of six. Weights are shared; others stay as they are."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if (fused := _fused_norm(norm)) is not None:
                setattr(parent, name, fused)
    return model


@torch.no_grad()
def _fused_norm(norm: nn.Module) -> nn.Module | None:
    """torch's norm with the same weight, if `norm` is plain RMS norm: some families add 1 to the weight."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not type(norm).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    fused = nn.RMSNorm(weight.shape, eps, device=weight.device, dtype=weight.dtype)
    fused.weight = weight
    x = torch.linspace(-2, 3, weight.numel(), device=weight.device, dtype=weight.dtype)
    return fused if torch.allclose(fused(x), norm(x), rtol=0.02, atol=0.02) else None
