"""The command line."""

import gc
from time import time

STARTED_S = time()
"""Start time of the program, taken before any module that computes is imported."""

# A command creates thousands of objects that live until its end, modules among them: collecting garbage is wasted
# effort.
gc.set_threshold(100_000)
