"""Names and versions of packages."""

import pytest
from packaging.specifiers import SpecifierSet

from topoplan.catalog.packages import allows, in_words, narrowed, packages, pip_words, releases
from topoplan.trainers.llamafactory.key_list import trainer_versions


@pytest.mark.parametrize(
    ("versions", "version", "answer"),
    [
        ("<2.12", "2.11.0+cu128", True),
        ("<2.12", "2.12.0", False),
        ("<2.12", "2.12.0a0+0291f960b6.nv26.4", False),
        (">=0.18,<0.19", "0.18.0rc1", True),
        (">=0.18,<0.19", "0.18.2", True),
        (">=0.18,<0.19", "0.17.1", False),
        (">=0.10.dev0", "0.10.0.dev0", True),
        (">=0.10.dev0", "0.0.1", False),
        ("", "anything at all", True),
        ("<2.12", "a checkout", True),
    ],
)
def test_a_version_made_from_a_release_counts_as_that_release(versions: str, version: str, answer: bool) -> None:
    assert allows(versions, version) is answer


@pytest.mark.parametrize(
    ("bounds", "one"),
    [
        (("", ""), ""),
        ((">=0.15,<0.19", ">=0.18"), ">=0.18,<0.19"),
        ((">=0.15,<0.19", "<0.18"), ">=0.15,<0.18"),
        ((">=0.9,!=0.9.5", ">=0.10,<1"), ">=0.10,<1,!=0.9.5"),
    ],
)
def test_several_bounds_become_one_without_what_others_imply(bounds: tuple[str, ...], one: str) -> None:
    assert narrowed(bounds) == one
    versions = ["0.9", "0.9.5", "0.10", "0.15", "0.17.9", "0.18", "0.18.7", "0.19", "1"]
    both = SpecifierSet(",".join(filter(None, bounds)))
    assert [v in SpecifierSet(one) for v in versions] == [v in both for v in versions]


def test_bounds_are_said_as_people_do() -> None:
    assert in_words("<0.18") == "below 0.18"
    assert in_words(">=2.12") == "2.12 and newer"
    assert in_words(">=0.15.3,<=0.16.1") == "from 0.15.3 to 0.16.1"


def test_pip_is_given_what_gets_the_package_that_is_meant() -> None:
    known = packages()
    assert pip_words(known["megatron-core"], ">=0.18,<0.19") == "'megatron-core>=0.18,<0.19'"
    assert pip_words(known["ms-swift"], "==4.6.0") == "ms-swift==4.6.0"
    assert pip_words(known["transformer-engine"], "") == "'transformer_engine[pytorch]'"
    adapter = pip_words(known["mcore_adapter"], ">=0.10.dev0")
    assert adapter.startswith("'git+https://github.com/alibaba/ROLL.git@8eb27cc2")
    assert all(name == package.name for name, package in known.items())


def test_what_bundles_are_written_for_is_the_first_of_the_versions_that_are_known() -> None:
    written, main = releases()
    assert written.version == written.name == trainer_versions()["llamafactory"]
    assert written.transformers == ">=4.55.0,<=5.6.0"
    assert main.transformers == ">=4.55.0,<=5.8.0,!=4.57.0,!=5.6.0"
    assert "5.6.0" in SpecifierSet(written.transformers)
    assert not {"4.57.0", "5.6.0", "5.8.1"} & set(SpecifierSet(main.transformers).filter(["4.57.0", "5.6.0", "5.8.1"]))
    assert "August 2026" in main.name
