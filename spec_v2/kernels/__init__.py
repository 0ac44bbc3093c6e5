"""One folder per operation: contract and dispatch, reference in plain torch, kernel."""
