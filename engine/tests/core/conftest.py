"""Makes this folder's helpers importable for its tests, also in the processes that they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
