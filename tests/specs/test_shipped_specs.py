from pathlib import Path

import jsonschema
import pytest
import yaml

from topoplan.specs.forms import schema_of_spec
from topoplan.specs.load import load_spec
from topoplan.specs.source import read_source

SPECS = sorted((Path(__file__).parents[2] / "cluster_specs").glob("*.yaml"))


def test_the_promised_ones_are_there() -> None:
    assert [path.name for path in SPECS] == [
        "a100-1x8.yaml",
        "a100-40g-4x8.yaml",
        "b200-128x8-deepseek-v3.yaml",
        "h100-4x8-aws-p5.yaml",
        "h100-4x8-azure-nd-h100-v5.yaml",
        "h100-4x8-gcp-a3-mega.yaml",
        "h100-4x8.yaml",
        "h20-2x8.yaml",
        "h200-16x8-qwen3-235b.yaml",
        "rtx4090-2x8-pcie.yaml",
    ]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
class TestAShippedSpec:
    def test_loads_under_its_own_name_and_shape(self, path: Path) -> None:
        cluster = load_spec(path).cluster
        assert cluster.name == path.stem
        assert f"-{cluster.nodes}x{cluster.gpus_per_node}" in path.stem
        assert cluster.gpu.name.startswith(path.stem.partition("-")[0])

    def test_meets_its_schema_and_names_it(self, path: Path) -> None:
        assert path.read_text().splitlines()[0] == "# yaml-language-server: $schema=spec.schema.json"
        jsonschema.validate(read_source(path).data, schema_of_spec())

    def test_meets_its_schema_as_tools_with_yaml_1_1_read_it(self, path: Path) -> None:
        jsonschema.validate(yaml.safe_load(path.read_text()), schema_of_spec())

    def test_has_a_job_with_its_hours(self, path: Path) -> None:
        job = load_spec(path).job
        assert job.samples is not None
        assert job.template is not None
        assert job.global_batch_size % 16 == 0

    def test_says_first_what_it_is_about(self, path: Path) -> None:
        assert path.read_text().splitlines()[1].startswith("# ")


def test_the_flagship_trains_all_of_a_vision_language_model() -> None:
    spec = load_spec(next(path for path in SPECS if path.stem == "h100-4x8"))
    job = spec.job
    assert spec.model.name == "Qwen/Qwen3-VL-8B-Instruct"
    assert (job.seq_len, job.global_batch_size, job.samples, job.epochs) == (4096, 64, 100_000, 3)
    frozen = (job.freeze_vision_tower, job.freeze_multi_modal_projector, job.freeze_language_model)
    assert frozen == (False, False, False)
    assert (spec.cluster.nvlink_bytes_per_s, spec.cluster.nic_bytes_per_s) == (450e9, 50e9)
