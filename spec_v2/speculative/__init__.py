"""One round of speculative decoding: draft, verify, publish, draft-extend."""
