from __future__ import annotations

from tests.reading.setups import make_setup
from topoplan.reading.found import found


def test_a_finding_stands_at_its_key_at_its_path_or_nowhere() -> None:
    configuration = make_setup("a: 1\nb:\n  c: 2\n").configurations[0]
    assert found(configuration, "rule", "note", "a", "what").line == 1
    assert found(configuration, "rule", "note", ("b", "c"), "what").line == 3
    assert found(configuration, "rule", "note", ("b", "missing"), "what").line == 2
    assert found(configuration, "rule", "note", None, "what").line is None
