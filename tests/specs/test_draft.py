"""Options layered over a spec file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.specs.test_load import CONFIG, SPEC
from topoplan.errors import SpecError
from topoplan.specs.load import load_spec


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "box.yaml"
    path.write_text(SPEC)
    return path


class TestTheOptions:
    def test_model_takes_the_place_of_the_files(self, spec_file: Path) -> None:
        assert load_spec(spec_file, model="Qwen/Qwen3-14B").model.name == "Qwen/Qwen3-14B"

    def test_model_is_relative_to_the_working_directory(
        self, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "cwd" / "tiny").mkdir(parents=True)
        (tmp_path / "cwd" / "tiny" / "config.json").write_text(json.dumps(CONFIG))
        monkeypatch.chdir(tmp_path / "cwd")
        assert load_spec(spec_file, model="./tiny").model.num_layers == 2
        assert load_spec(spec_file, overrides=["model=./tiny"]).model.num_layers == 2

    @pytest.mark.parametrize(
        "text", ["seq_len: 8192\nglobal_batch_size: 32\n", "job: {seq_len: 8192, global_batch_size: 32}\n"]
    )
    def test_job_takes_the_place_of_the_files(self, spec_file: Path, tmp_path: Path, text: str) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        job = load_spec(spec_file, job=path).job
        assert (job.seq_len, job.global_batch_size, job.pin) == (8192, 32, {})

    def test_job_may_bring_its_model_from_its_own_directory(self, spec_file: Path, tmp_path: Path) -> None:
        (tmp_path / "jobs" / "tiny").mkdir(parents=True)
        (tmp_path / "jobs" / "tiny" / "config.json").write_text(json.dumps(CONFIG))
        path = tmp_path / "jobs" / "job.yaml"
        path.write_text("model: ./tiny\njob: {seq_len: 8192, global_batch_size: 32}\n")
        assert load_spec(spec_file, job=path).model.num_layers == 2

    def test_job_names_its_own_file_and_line(self, spec_file: Path, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text("seq_len: 8192\n\nglobal_batch_size: 0\n")
        with pytest.raises(SpecError, match=r"job\.yaml:3: job\.global_batch_size: 0 is out of range"):
            load_spec(spec_file, job=path)
        path.write_text("job: {seq_len: 1}\nnodes: 2\n")
        with pytest.raises(SpecError, match=r"job\.yaml:2: unknown key 'nodes' in a job file"):
            load_spec(spec_file, job=path)

    @pytest.mark.parametrize(
        ("override", "reached"),
        [
            ("seq_len=8192", lambda spec: spec.job.seq_len == 8192),
            ("job.seq_len=8192", lambda spec: spec.job.seq_len == 8192),
            ("nodes=2", lambda spec: spec.cluster.nodes == 2),
            ("ib_bandwidth=200Gb/s", lambda spec: spec.cluster.nic_bytes_per_s == 25e9),
            ("nvlink_bandwidth=none", lambda spec: spec.cluster.nvlink_bytes_per_s == 0),
            ("fabric.latency=8us", lambda spec: spec.cluster.fabric.latency_s == 8e-6),
            ("trainer.save_steps=500", lambda spec: spec.job.trainer == {"save_steps": 500}),
            ("pin.pp=2", lambda spec: spec.job.pin == {"tp": 4, "pp": 2}),
            ("gpu=h200-sxm-141gb", lambda spec: spec.cluster.gpu.name == "h200-sxm-141gb"),
            ("gpu.memory=95GiB", lambda spec: spec.cluster.gpu.memory_bytes == 95 * 2**30),
            ("learning_rate=1e-6", lambda spec: spec.job.learning_rate == 1e-6),
            ("env.NCCL_DEBUG=INFO", lambda spec: spec.cluster.env == {"NCCL_DEBUG": "INFO"}),
            ("packing=no", lambda spec: spec.job.packing is False),
            ("name=a=b", None),
        ],
    )
    def test_set_reaches_every_key(self, spec_file: Path, override: str, reached: Any) -> None:
        if reached is None:
            with pytest.raises(SpecError, match=r"^--set name=a=b: 'a=b' is not usable"):
                load_spec(spec_file, overrides=[override])
        else:
            assert reached(load_spec(spec_file, overrides=[override]))

    @pytest.mark.parametrize("pins", ["tp=2,pp=2", " tp = 2 , pp=2,", ["tp=2", "pp=2"], {"tp": 2, "pp": 2}])
    def test_pins_win_over_the_files(self, spec_file: Path, pins: Any) -> None:
        assert load_spec(spec_file, pins=pins).job.pin == {"tp": 2, "pp": 2}

    def test_pins_of_recompute_may_be_short_or_dotted(self, spec_file: Path) -> None:
        assert load_spec(spec_file, pins="recompute=full").job.pin["recompute"] == {"granularity": "full"}
        pins = "recompute.granularity=selective,recompute.modules=core_attn+mlp"
        recompute = load_spec(spec_file, pins=pins).job.pin["recompute"]
        assert recompute == {"granularity": "selective", "modules": ["core_attn", "mlp"]}
