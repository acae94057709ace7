"""The command line."""

from time import time

STARTED_S = time()
"""Start time of the program, taken before any module that computes is imported."""
