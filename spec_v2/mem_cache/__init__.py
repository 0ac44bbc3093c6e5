"""Who owns which KV slot: pages, rows and the tensors behind them."""
