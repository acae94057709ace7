"""The measured runs of the catalog, graded once for all tests."""

from functools import cache

from topoplan.planner.measured import shipped_runs
from topoplan.planner.validate import Validation, validate


@cache
def graded() -> Validation:
    """What `topoplan validate` works out of them."""
    return validate(shipped_runs())
