from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from topoplan.catalog.releases import release_of, releases
from topoplan.trainers.llamafactory.key_list import trainer_versions


def test_what_bundles_are_written_for_is_the_first_of_the_versions_that_are_known() -> None:
    written, main = releases()
    assert written.version == written.name == trainer_versions()["llamafactory"]
    assert written.transformers == ">=4.55.0,<=5.6.0"
    assert main.transformers == ">=4.55.0,<=5.8.0,!=4.57.0,!=5.6.0"
    assert "5.6.0" in SpecifierSet(written.transformers)
    assert not {"4.57.0", "5.6.0", "5.8.1"} & set(SpecifierSet(main.transformers).filter(["4.57.0", "5.6.0", "5.8.1"]))
    assert "August 2026" in main.name


@pytest.mark.parametrize(
    ("installed", "known"),
    [
        ("0.9.5", "0.9.5"),
        ("0.9.6.dev0", "0.9.6.dev0"),
        ("0.9.6", "0.9.6.dev0"),
        ("0.9.4", None),
        ("0.9.5+cpu", "0.9.5"),
    ],
)
def test_an_installed_version_is_judged_by_the_newest_known_one_before_it(installed: str, known: str | None) -> None:
    found = release_of(installed)
    assert (found.version if found else None) == known
