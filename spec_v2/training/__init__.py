"""How draft models are made: for the default model, and for any other causal LM that transformers knows.

Reading order: `generate` (the target writes prompts and answers them), `shards` (tokens on disk, batches in memory),
`capture` (what the frozen target says about a batch), `unroll` (a head reads its own drafts, as it will at inference),
`kinds` (what differs between EAGLE, EAGLE-3 and the others), `optimizer`, `fit` (the loop), `checkpoint` (what is
shipped), `evaluate` (held-out prompts, through the engine), `command` (`python -m spec_v2 train`).
"""
