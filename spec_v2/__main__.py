"""`python -m spec_v2`, the same as the command `spec-v2`."""

from spec_v2.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
