"""What every test shares: torch computes in one thread, as an engine does.

Results are bit-stable for one number of threads only, and on a busy two-core machine a second thread costs more than it gives.
"""

import os

# Before anything imports torch; processes that a test starts inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
