"""YAML and JSON, and which trainer their keys belong to."""

from pathlib import Path

import pytest

from topoplan.errors import SpecError
from topoplan.reading.read_setup import read_setup
from topoplan.trainers.recognizers import recognizers


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


KINDS = {
    "llamafactory": "model_name_or_path: a\nstage: sft\n",
    "deepspeed": "zero_optimization:\n  stage: 2\n",
    "trinity": "model:\n  model_path: ${oc.env:MODEL_PATH,org/a}\n",
    "swift": "model: a\ntuner_type: full\nlearning_rate: 1e-5\n",
    "swift-megatron": "model: a\nmicro_batch_size: 1\nglobal_batch_size: 16\ntensor_model_parallel_size: 2\n",
    "accelerate": "compute_environment: LOCAL_MACHINE\nnum_processes: 8\n",
}


@pytest.mark.parametrize("trainer", KINDS)
def test_whose_configuration_it_is(here: Path, trainer: str) -> None:
    (here / "a.yaml").write_text(KINDS[trainer])
    (configuration,) = read_setup(["a.yaml"], recognizers()).configurations
    assert configuration.trainer == trainer


@pytest.mark.parametrize("comment", ["// ZeRO-3", "/* ZeRO-3 */", "# ZeRO-3"])
def test_json_with_comments_is_told_that_json_has_none(here: Path, comment: str) -> None:
    (here / "a.json").write_text('{\n  "zero_optimization": {\n    "stage": 3 ' + comment + "\n  }\n}\n")
    with pytest.raises(SpecError, match=r"^a.json:3: is not valid JSON: .*JSON has no comments"):
        read_setup(["a.json"], recognizers())


@pytest.mark.parametrize("text", ['{\n  "a": [1,\n  2,\n\n  ]}', '{\n  "a": 1,\n  "b": 2,\n\n}\n'])
def test_a_comma_behind_the_last_item_is_told_at_its_own_line(here: Path, text: str) -> None:
    (here / "a.json").write_text(text)
    with pytest.raises(SpecError, match=r"^a.json:3: is not valid JSON: a comma behind the last item"):
        read_setup(["a.json"], recognizers())


@pytest.mark.parametrize(
    "text",
    [
        "max_seq_len: 2048\nseed: 17\nmodel:\n  name: mpt_causal_lm\nfsdp_config:\n  cpu: false\n",  # LLM Foundry
        "_target_: verl.CriticConfig\nstrategy: fsdp\nmodel:\n  path: ~/models/a\nrollout_n: 1\n",  # verl
        "train_batch_size: 1024\ntrain_files: a.parquet\nval_files: b.parquet\nreturn_raw_chat: true\n",  # verl's data
        '{"max_steps": 300, "eval_steps": 100, "optimizer_kwargs": {"lr": 5e-5}}',  # a harness of PEFT
    ],
)
def test_files_of_other_programs_are_not_taken_for_a_trainer_s(here: Path, text: str) -> None:
    (here / "a.yaml").write_text(text)
    with pytest.raises(SpecError, match="is a configuration of an unknown kind"):
        read_setup(["a.yaml"], recognizers())


def test_a_configuration_of_an_unknown_kind_is_refused_with_what_is_read(here: Path) -> None:
    (here / "a.yaml").write_text("apiVersion: v1\nkind: Pod\n")
    with pytest.raises(
        SpecError, match=r"unknown kind; read are .*DeepSpeed.*; it looks like a manifest of Kubernetes"
    ):
        read_setup(["a.yaml"], recognizers())
    (here / "a.yaml").write_text("nodes: 4\ngpus_per_node: 8\ngpu: h100\n")
    with pytest.raises(SpecError, match="cluster spec of topoplan"):
        read_setup(["a.yaml"], recognizers())


def test_json_is_read_strictly(here: Path) -> None:
    (here / "a.json").write_text('{\n  "zero_optimization": {"stage": 2},\n  # a comment\n}\n')
    with pytest.raises(SpecError, match=r"a\.json:3: is not valid JSON"):
        read_setup(["a.json"], recognizers())


def test_anchors_that_explode_and_deep_nesting_are_refused(here: Path) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    for name, text in {"a.yaml": bomb, "b.json": "[" * 5000, "c.yaml": "{a: " * 5000}.items():
        (here / name).write_text(text)
        with pytest.raises(SpecError):
            read_setup([name], recognizers())


def test_an_error_in_a_block_names_the_line_of_the_file(here: Path) -> None:
    (here / "a.md").write_text("Text\n\n```yaml\nmodel_name_or_path: a\nseed: 1\nseed: 2\n```\n")
    with pytest.raises(SpecError, match=r"^a\.md:6: key 'seed' is given twice"):
        read_setup(["a.md"], recognizers())


def test_a_job_of_megatron_bridge_is_not_taken_for_one_of_the_adapter(here: Path) -> None:
    (here / "a.yaml").write_text("stage: sft\ntensor_model_parallel_size: 2\nuse_packed_sequences: false\n")
    setup = read_setup(["a.yaml"], recognizers())
    assert setup.training_path(setup.configurations[0]) == "bridge"


def test_keys_that_ms_swift_alone_knows_are_its_own(here: Path) -> None:
    (here / "a.yaml").write_text("max_new_tokens: 1024\ntemperature: 0\nstream: true\n")
    assert [one.trainer for one in read_setup(["a.yaml"], recognizers()).configurations] == ["swift"]
