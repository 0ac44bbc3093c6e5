"""Penalties, logit bias and banned stop tokens, for every node along its own path.

So the logits of a node are what plain decoding would see after that path, and nothing depends on how much was
drafted. Order: repetition penalty (Keskar et al. 2019, arXiv 1909.05858), presence and frequency penalty (as in
OpenAI's API: over the output only), bias, then the ban of stop tokens before `min_new_tokens`.
"""

from spec_v2.kernels.adjust_logits.reference import LogitInputs, TokenCounts
from spec_v2.kernels.adjust_logits.reference import adjust_logits_reference as adjust_logits

__all__ = ["LogitInputs", "TokenCounts", "adjust_logits"]
