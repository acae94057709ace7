from pathlib import Path

import pytest

from topoplan.errors import InputError, SpecError, UnitError
from topoplan.specs import known
from topoplan.specs.load import load_spec, spec_from_document
from topoplan.specs.profile import OwnProfile, read_profile

SPEC = """\
nodes: 1
gpu: h100-sxm-80gb
profile: own/mine.yaml
model: Qwen/Qwen3-8B
job: {seq_len: 4096, global_batch_size: 64}
"""


def profile(folder: Path, text: str) -> OwnProfile:
    path = folder / "mine.yaml"
    path.write_text(text)
    return read_profile(path)


def test_any_of_the_constants_are_read_into_base_units(tmp_path: Path) -> None:
    found = profile(
        tmp_path,
        "gpu: H100-SXM-80GB\nsource: ours\ngemm_efficiency: 80%\ngemm_tile: [128, 128]\ncollective_latency_s: 12us\n"
        "step_overhead_s: 0.02\ncontext_bytes: 0.5GB\nflash_attention: true\ntp_overlap: 0\ntime_band: 0.1\n"
        "host_adam_bytes_per_s: 80GB/s\ntcp_socket_bytes_per_s: 3e9\nnccl_inside_gb_per_s: [40, 30.5, 3]\n"
        "eager_launch_s: 5us\nnvls_inside_channels: 0\nrouter_kernels: 8\n",
    )
    assert (found.gpu, found.source) == ("h100-sxm-80gb", "ours")
    assert found.constants == {
        "gemm_efficiency": 0.8,
        "gemm_tile": (128, 128),
        "collective_latency_s": pytest.approx(12e-6),
        "step_overhead_s": 0.02,
        "context_bytes": 500_000_000,
        "flash_attention": True,
        "tp_overlap": 0.0,
        "time_band": 0.1,
        "host_adam_bytes_per_s": 80e9,
        "tcp_socket_bytes_per_s": 3e9,
        "nccl_inside_gb_per_s": (40.0, 30.5, 3.0),
        "eager_launch_s": pytest.approx(5e-6),
        "nvls_inside_channels": 0,
        "router_kernels": 8,
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gemm_efficiency: 1.4", "1.4 is out of range; expected a fraction above 0 up to 1"),
        ("gemm_efficiency: 76", "did you mean 76%?"),
        ("nvlink_efficiency: 0", "0 is out of range"),
        ("tp_overlap: -0.1", "expected a fraction from 0 up to 1"),
        ("hop_latency_s: -1", "-1 is far below what exists"),
        ("kernel_launch_s: 3 parsecs", "no unit 'parsecs'"),
        ("gemm_tile: [0, 128]", "expected two even whole numbers"),
        ("gemm_tile: 128", "128 is not a tile"),
        ("gemm_prologue: -1", "out of range"),
        ("time_band: 0", "0 is out of range"),
        ("nccl_inside_gb_per_s: 40", "40 is not a list of rates; expected up to 64 falling rates above 0, in GB/s"),
        ("nccl_inside_gb_per_s: []", "is not a list of rates"),
        ("nccl_inside_gb_per_s: [30, 40]", "is out of range"),
        ("nccl_between_gb_per_s: [30, 0]", "is out of range"),
        ("nccl_between_gb_per_s: [.nan]", "is out of range"),
        ("nccl_between_gb_per_s: [yes]", "is not a list of rates"),
        ("host_adam_bytes_per_s: 3 parsecs", "no unit 'parsecs'"),
        ("host_adam_bytes_per_s: 0", "0 is far below what exists"),
        ("nvls_inside_channels: 65", "out of range"),
        ("flash_attention: maybe", "expected true or false"),
        ("gemm_efficency: 0.7", "did you mean 'gemm_efficiency'?"),
        ("wheels: 4", "`topoplan show profile` lists the constants"),
    ],
)
def test_an_impossible_or_unknown_number_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises((SpecError, UnitError)) as error:
        profile(tmp_path, f"gpu: h100-sxm-80gb\n{line}\n")
    assert "mine.yaml:2: " in str(error.value)
    assert message in str(error.value)


def test_the_gpu_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"`gpu` is missing; add `gpu: h100-sxm-80gb`"):
        profile(tmp_path, "gemm_efficiency: 0.7\n")


def test_a_profile_is_of_a_card_or_of_its_architecture(tmp_path: Path) -> None:
    h100, a100 = known.gpu("h100-sxm-80gb"), known.gpu("a100-sxm-80gb")
    assert profile(tmp_path, "gpu: hopper\n").is_of(h100)
    found = profile(tmp_path, "gpu: h100-sxm-80gb\n")
    found.check_gpu(h100)
    with pytest.raises(SpecError, match="the profile is of h100-sxm-80gb, and the cluster has a100-sxm-80gb"):
        found.check_gpu(a100)


def test_a_spec_names_a_profile_beside_itself(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    profile(tmp_path / "own", "gpu: h100-sxm-80gb\ngemm_efficiency: 0.7\n")
    (tmp_path / "spec.yaml").write_text(SPEC)
    found = load_spec(tmp_path / "spec.yaml").profile
    assert found.constants == {"gemm_efficiency": 0.7}


def test_an_argument_goes_before_the_profile_of_the_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    profile(tmp_path, "gpu: hopper\ngemm_efficiency: 0.6\n")
    found = load_spec(tmp_path / "spec.yaml", profile=tmp_path / "mine.yaml").profile
    assert found.constants == {"gemm_efficiency": 0.6}


def test_a_mistake_in_the_profile_of_a_spec_names_both_files(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    with pytest.raises(InputError, match=r"spec.yaml:3: profile: .*mine.yaml: no such file"):
        load_spec(tmp_path / "spec.yaml")


def test_a_run_document_takes_a_profile_too(tmp_path: Path) -> None:
    own = profile(tmp_path, "gpu: h100-sxm-80gb\n")
    document = {
        "cluster": {"gpu": "h100-sxm-80gb", "nodes": 1},
        "model": {"name": "Qwen/Qwen3-8B"},
        "job": {"seq_len": 4096, "global_batch_size": 64},
    }
    assert spec_from_document(document, where="x", profile=own).profile is own
    document["cluster"] = {"gpu": "a100-sxm-80gb", "nodes": 1}
    with pytest.raises(SpecError, match="the cluster has a100-sxm-80gb"):
        spec_from_document(document, where="x", profile=own)
