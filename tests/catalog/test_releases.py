from packaging.specifiers import SpecifierSet

from topoplan.catalog.releases import releases
from topoplan.trainers.llamafactory.key_list import trainer_versions


def test_what_bundles_are_written_for_is_the_first_of_the_versions_that_are_known() -> None:
    written, main = releases()
    assert written.version == written.name == trainer_versions()["llamafactory"]
    assert written.transformers == ">=4.55.0,<=5.6.0"
    assert main.transformers == ">=4.55.0,<=5.8.0,!=4.57.0,!=5.6.0"
    assert "5.6.0" in SpecifierSet(written.transformers)
    assert not {"4.57.0", "5.6.0", "5.8.1"} & set(SpecifierSet(main.transformers).filter(["4.57.0", "5.6.0", "5.8.1"]))
    assert "August 2026" in main.name
