"""What the files of each trainer mean: the job and the layout that are read from them, or why they are not predicted.

`jobs/*.yaml` has sections of cases that change one usual file:

    plain:
      cluster: a100-1x8
      keys: {model_name_or_path: Qwen/Qwen3-8B, stage: sft}
      cases:
      - {with: {stage: pt}, job: {packing: true}, layout: {backend: ddp}}
      - {with: {stage: ppo}, refused: "'ppo'", key: stage}

`keys` are those of train.yaml, or the options of a `command`. A case changes them by `with` and leaves out those in
`without`; `script` is a script that reads train.yaml, and `also` names further files. `job`, `layout`, `cluster` and
`model` are attributes of what is read, `assumes` is a part of one of its assumptions; `refused` is a part of the
message, and `key` the key that it is about.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tables import table
from topoplan.errors import InputError
from topoplan.lint.translate import Translation, translate
from topoplan.reading.read_setup import read_setup
from topoplan.reading.values import NotPredictedError
from topoplan.specs.load import load_cluster
from topoplan.trainers.recognizers import recognizers

CASES = [
    pytest.param(section, case, id=f"{path.stem}, {name}: {number}")
    for path in sorted((Path(__file__).parent / "jobs").glob("*.yaml"))
    for name, section in table(path).items()
    for number, case in enumerate(section["cases"])
]


def changed(keys: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return keys with changes, which go into the blocks that the keys have."""
    return keys | {
        key: changed(keys[key], value) if isinstance(value, dict) and isinstance(keys.get(key), dict) else value
        for key, value in changes.items()
    }


def files_of(section: dict[str, Any], case: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the files of a case by name; the first one is given to the reader, and those of `also`."""
    keys = changed(section["keys"], case["with"])
    keys = {key: value for key, value in keys.items() if key not in case.get("without", ())}
    if command := case.get("command", section.get("command")):
        words = (f"--{key} {str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items())
        return {"run.sh": " ".join([command, *words]) + "\n"}
    script = case.get("script", section.get("script"))
    return ({"run.sh": f"{script}\n"} if script else {}) | {"train.yaml": yaml.safe_dump(keys, sort_keys=False)}


def read(section: dict[str, Any], case: dict[str, Any], folder: Path) -> Translation:
    files, also = files_of(section, case), case.get("also", {})
    for name, text in {**files, **also}.items():
        (folder / name).write_text(text, encoding="utf-8")
    setup = read_setup([str(folder / name) for name in (next(iter(files)), *also)], recognizers())
    (one,) = setup.complete_configurations
    return translate(one, setup, load_cluster(f"cluster_specs/{section['cluster']}.yaml"))


@pytest.mark.parametrize(("section", "case"), CASES)
def test_a_file_is_read_as_its_trainer_reads_it(section: dict[str, Any], case: dict[str, Any], tmp_path: Path) -> None:
    if "refused" in case:
        with pytest.raises(InputError) as error:
            read(section, case, tmp_path)
        assert case["refused"] in str(error.value)
        assert error.value.remedy or error.value.expected or not isinstance(error.value, NotPredictedError)
        assert "key" not in case or (isinstance(error.value, NotPredictedError) and error.value.key == case["key"])
        return
    found = read(section, case, tmp_path)
    assert any(case.get("assumes", "") in words for words in ("", *found.assumptions))
    parts = {"layout": found.layout, "job": found.spec.job, "cluster": found.spec.cluster, "model": found.spec.model}
    for part, value in parts.items():
        expected = case.get(part, {})
        actual = {key: attrgetter(key)(value) for key in expected}
        if "pin" in expected:
            actual["pin"] = {key: actual["pin"][key] for key in expected["pin"]}
        assert {key: list(one) if isinstance(one, tuple) else one for key, one in actual.items()} == expected
