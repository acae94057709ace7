"""The catalog's measured runs, graded once for all tests."""

from functools import cache

from topoplan.planner.measured import shipped_runs
from topoplan.planner.validate import Validation, validate


@cache
def graded() -> Validation:
    """Return the result of `topoplan validate` for the shipped runs."""
    return validate(shipped_runs())
