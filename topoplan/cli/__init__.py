"""The command line."""

from time import time

STARTED_S = time()
"""When the program began: nothing of it that computes was read before."""
