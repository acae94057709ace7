import pytest

from topoplan.terms import Difference, Term, differences, source_of, sum_of


def leaf(name: str, value: float, times: float = 1.0) -> Term:
    return Term(name, value, "bytes", "a.py::b", times=times)


TREE = sum_of(
    "all",
    [sum_of("layers", [leaf("q", 6.0, 3), leaf("k", 3.0, 3)], "a.py::b", "bytes"), leaf("end", 1.0)],
    "a.py::c",
    "bytes",
)


def test_a_sum_has_the_value_of_its_children() -> None:
    assert TREE.value == 10.0
    assert TREE.at("layers", "q").each == 2.0
    assert [one.name for one in TREE.leaves()] == ["q", "k", "end"]
    assert [one.name for one in TREE.walk()] == ["all", "layers", "q", "k", "end"]


def test_what_is_zero_is_left_out_unless_it_is_asked_for() -> None:
    assert sum_of("all", [leaf("a", 0.0)], "", "s").children == ()
    assert len(sum_of("all", [leaf("a", 0.0)], "", "s", with_zeros=True).children) == 1


def test_a_path_that_is_not_there_names_where_it_ends() -> None:
    with pytest.raises(KeyError, match="'v' is not among the terms of 'layers'"):
        TREE.at("layers", "v")


def test_a_tree_is_changed_to_another_unit_and_repeated() -> None:
    seconds = TREE.scaled(0.5, "s", "c.py::d")
    assert {one.unit for one in seconds.walk()} == {"s"}
    assert {one.source for one in seconds.walk()} == {"c.py::d"}
    assert (seconds.at("layers", "q").value, seconds.at("layers", "q").times) == (3.0, 3)
    twice = TREE.repeated(2)
    assert (twice.at("layers", "q").value, twice.at("layers", "q").times, twice.at("layers", "q").each) == (
        12.0,
        6,
        2.0,
    )


def test_a_source_is_the_function_itself() -> None:
    assert source_of(sum_of, "a paper") == "terms.py::sum_of; a paper"
    assert source_of(Term.repeated) == "terms.py::Term.repeated"


def test_differences_are_by_name_and_the_largest_is_first() -> None:
    found = differences([leaf("a", 1.0), leaf("b", 5.0)], [leaf("b", 2.0), leaf("c", 1.0)])
    assert found[0] == Difference(name="b", first=5.0, second=2.0)
    assert [(one.name, one.more) for one in found[1:]] == [("a", -1.0), ("c", 1.0)]
