"""Exit codes beside those that errors carry (`topoplan.errors`)."""

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
