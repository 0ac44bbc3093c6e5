"""`python -m spec_v2 bench`: every contender over the same prompts, in turn, and what a decode step is made of."""
