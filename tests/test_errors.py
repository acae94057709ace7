"""The parts of error messages."""

from topoplan.errors import listed, nearest_file_name


def test_names_are_listed_as_one_says_them() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c"], "or") == "a, b or c"
    assert listed([]) == ""


def test_a_suffix_alone_does_not_make_files_alike() -> None:
    assert nearest_file_name("missing.yaml", ["bin.yaml", "notes.md"]) == ""
    assert nearest_file_name("cluster.yml", ["bin.yaml", "cluster.yaml"]) == "did you mean 'cluster.yaml'?"
    assert nearest_file_name("clutser.yaml", ["cluster.yaml"]) == "did you mean 'cluster.yaml'?"
