"""The modules of `scripts/soak`: changing sources, clients that load, faults, and a judge."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))  # what the tests use too
