import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bundle.samples import CLUSTER, HOSTS, QWEN3_8B, make_spec_and_plan
from topoplan.bundle.bundle import generate
from topoplan.bundle.whole import INCOMPLETE, mark_text, read_mark, refuse_incomplete
from topoplan.bundle.write import MANIFEST, write_bundle
from topoplan.errors import SpecError
from topoplan.lint.check import check
from topoplan.planner.predict import predict
from topoplan.run.bundle_reader import read_bundle

FOUR = replace(CLUSTER, hosts=tuple(replace(host, socket_interface=None, hcas=()) for host in HOSTS))


def bundle_of(**what: object) -> dict[str, str]:
    spec, plan = make_spec_and_plan(**{"cluster": FOUR, "model": QWEN3_8B, "tp": 2, **what})
    return generate(spec, predict(spec, plan.layout))


@pytest.fixture(scope="module")
def bundles() -> dict[str, dict[str, str]]:
    return {"old": bundle_of(), "new": bundle_of(tp=4)}


@pytest.fixture
def bundle(tmp_path: Path, bundles: dict[str, dict[str, str]]) -> Path:
    write_bundle(bundles["old"], tmp_path / "bundle")
    return tmp_path / "bundle"


def refused(directory: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read_bundle(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_mark_is_read_as_it_was_written_and_nothing_else_is_one(tmp_path: Path) -> None:
    assert read_mark(tmp_path) is None
    known = {"train.yaml": frozenset(["a", "b"]), "node-00.sh": frozenset(["c"])}
    (tmp_path / "train.yaml").write_text(mark_text(known))
    assert read_mark(tmp_path) == known
    (tmp_path / "train.yaml").write_text(f"lr: 1\n{INCOMPLETE}\n")
    assert read_mark(tmp_path) is None


def test_files_of_an_incomplete_bundle_are_refused_one_by_one_and_others_beside_it_are_not(bundle: Path) -> None:
    (bundle / "train.yaml").write_text(mark_text({"node-00.sh": frozenset()}))
    (bundle / "mine.yaml").write_text("a: 1\n")
    refuse_incomplete(bundle / "mine.yaml")
    refuse_incomplete(bundle.parent)
    for path in (bundle, bundle / "train.yaml", bundle / "node-00.sh"):
        with pytest.raises(SpecError, match=r"is incomplete.*topoplan generate --from"):
            refuse_incomplete(path)


class TestContent:
    @pytest.mark.parametrize("name", ["train.yaml", "node-02.sh", "hosts.json", "README.md"])
    @pytest.mark.parametrize("text", ["", " \n\n"])
    def test_that_is_empty_is_refused_with_what_mends_it(self, bundle: Path, name: str, text: str) -> None:
        (bundle / name).write_text(text)
        assert f"{name}: is empty; write it again: topoplan generate --from" in refused(bundle)
        write_bundle(bundle_of(), bundle)
        assert read_bundle(bundle).notes == ()

    def test_of_a_script_that_is_cut_off_is_refused(self, bundle: Path, bundles: dict[str, dict[str, str]]) -> None:
        whole = (bundle / "node-01.sh").read_bytes()
        (bundle / "node-01.sh").write_bytes(whole[:1000])
        assert f"node-01.sh: is truncated after 1000 of {len(whole)} bytes; write it again" in refused(bundle)
        write_bundle(bundles["old"], bundle)
        assert read_bundle(bundle).notes == ()

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("train.yaml", "a: [1\n", "is not valid YAML"),
            ("train.yaml", "- a\n", "holds a list"),
            ("train.yaml", "# all of it is gone\n", "train.yaml: is empty"),
            ("hosts.json", '{"run": ', "is not JSON"),
        ],
    )
    def test_that_cannot_be_parsed_is_refused(self, bundle: Path, name: str, text: str, words: str) -> None:
        (bundle / name).write_text(text)
        message = refused(bundle)
        assert words in message
        assert "repair it, or write the bundle again: topoplan generate --from" in message

    @pytest.mark.parametrize("trainer", ["swift", "trinity"])
    def test_of_other_trainers_too(self, tmp_path: Path, trainer: str) -> None:
        spec, plan = make_spec_and_plan(cluster=FOUR, model=QWEN3_8B, backend="fsdp2", job={"packing": False})
        write_bundle(generate(spec, predict(spec, plan.layout), None, trainer), tmp_path / "bundle")
        read_bundle(tmp_path / "bundle")
        (tmp_path / "bundle" / "train.yaml").write_text("")
        assert "train.yaml: is empty" in refused(tmp_path / "bundle")

    def test_a_node_script_refuses_an_empty_file_beside_it(self, bundle: Path) -> None:
        (bundle / "train.yaml").write_text("")
        ran = subprocess.run(["bash", bundle / "node-03.sh"], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert "train.yaml is missing or empty in" in ran.stderr

    @pytest.mark.parametrize(
        "edit",
        [
            lambda text: text.replace("identity", "my_data"),
            lambda text: "# another head\n" + text.partition("\n")[2],
            lambda text: text[: text.rindex("\n", 0, -1) + 1],
        ],
    )
    def test_that_was_edited_is_the_users_own_business(self, bundle: Path, edit: Callable[[str], str]) -> None:
        text = (bundle / "train.yaml").read_text()
        (bundle / "train.yaml").write_text(edit(text))
        assert read_bundle(bundle).edited == ("train.yaml",)


class TestAMixture:
    """Mixtures without a marker, as left by earlier versions or by interrupted copies."""

    def mixed(self, directory: Path, files: dict[str, str], *names: str) -> None:
        for name in names:
            (directory / name).write_text(files[name])

    @pytest.mark.parametrize("names", [("train.yaml",), ("node-03.sh",), ("train.yaml", "node-00.sh", "node-01.sh")])
    def test_of_new_files_and_an_old_plan_is_refused(
        self, bundle: Path, bundles: dict[str, dict[str, str]], names: tuple[str, ...]
    ) -> None:
        self.mixed(bundle, bundles["new"], *names)
        message = refused(bundle)
        assert "is a mixture of two bundles" in message
        assert message.endswith("--force")
        (finding,) = [one for one in check([str(bundle)]).findings if one.rule == "bundle-mixture"]
        assert finding.severity == "error"
        assert f"{finding.what}; {finding.remedy}" in message

    def test_of_a_new_plan_and_old_files_is_mended_without_force(
        self, bundle: Path, bundles: dict[str, dict[str, str]]
    ) -> None:
        self.mixed(
            bundle, bundles["new"], *(name for name in bundles["new"] if name not in ("README.md", "node-02.sh"))
        )
        assert "README.md, node-02.sh of one" in refused(bundle)
        write_bundle(bundles["new"], bundle)
        assert read_bundle(bundle).notes == ()

    def test_is_none_where_only_the_manifest_is_of_another(
        self, bundle: Path, bundles: dict[str, dict[str, str]]
    ) -> None:
        self.mixed(bundle, bundles["new"], *bundles["new"])
        assert read_bundle(bundle).edited == ()
        (bundle / MANIFEST).unlink()
        assert read_bundle(bundle).edited == ()
