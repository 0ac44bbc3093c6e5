"""Runs a transformers causal LM on our slots."""
