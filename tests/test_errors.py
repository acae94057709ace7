"""The parts of error messages."""

from topoplan.errors import listed


def test_names_are_listed_as_one_says_them() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c"], "or") == "a, b or c"
    assert listed([]) == ""
