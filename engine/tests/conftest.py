"""Makes helpers that several folders of tests share importable, and keeps oneDNN from AMX."""

import os
import sys
from pathlib import Path

# With AMX the last bits of oneDNN's bfloat16 products depend on the number of rows (docs/engine/sampler.md); tests compare bits.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

sys.path.insert(0, str(Path(__file__).parent))
