"""Rejection sampling along a chain (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Accepts more than following the target's own sample does, and keeps the target's distribution, but not the
sample: for a given seed the tokens differ from plain decoding.
"""

from spec_v2.kernels.accept_chain.reference import accept_chain_reference as accept_chain

__all__ = ["accept_chain"]
