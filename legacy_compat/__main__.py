"""`python -m legacy_compat`."""

import sys

from legacy_compat.cli import main

sys.exit(main())
