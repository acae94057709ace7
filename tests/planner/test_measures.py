"""Times measured separately: read, compared with formulas, and learned from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.page.asked import run
from topoplan.errors import InputError
from topoplan.planner.learn import learn_from
from topoplan.planner.measures import Measures, is_measures, measures_of, measures_to_dict, read_measures
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.load import load_spec
from topoplan.specs.profile import OwnProfile

SPEC = load_spec(Path(__file__).resolve().parents[2] / "cluster_specs" / "h100-4x8.yaml")
ABOUT = {"gpu": "NVIDIA H100 80GB HBM3", "gpus": 8, "nodes": 4, "torch": "2.9.1", "nccl": "2.27.5"}
MIB = 2**20
THINGS: list[dict[str, Any]] = [
    *({"kind": "matmul", "rows": rows, "columns": 4096, "inner": 4096} for rows in (2048, 8192)),
    {"kind": "attention", "heads": 32, "tokens": 4096, "width": 128},
    {"kind": "copy", "bytes": 256 * MIB},
    *(
        {"kind": kind, "size": size, "stride": stride, "bytes": count}
        for kind in ("all-reduce", "all-gather", "all-to-all")
        for size, stride in ((8, 1), (4, 8))
        for count in (16 * MIB, 128 * MIB)
    ),
]


def measured(**off: float) -> Measures:
    """Return measures of a machine whose constants are the catalog's, multiplied by these factors."""
    base = profile_of(SPEC.cluster.gpu)
    constants = {key: getattr(base, key) * factor for key, factor in off.items()}
    truth = profile_of(SPEC.cluster.gpu, OwnProfile(gpu=base.name, constants=constants, source="", path=""))
    rows = measures_of(ABOUT, [{**one, "seconds": 1.0, "slowest_s": 1.0} for one in THINGS], "measured.json").rows
    times = [one.predicted_s(SPEC.cluster, truth) if one.is_used else 1e-3 for one in rows]
    told = [{**one, "seconds": took, "slowest_s": took} for one, took in zip(THINGS, times, strict=True)]
    return measures_of(ABOUT, told, "measured.json")


def factors(**off: float) -> dict[str, float]:
    time = learn_from([], measures=[(SPEC, measured(**off))]).time
    return dict(time.factors)


def test_each_part_of_a_machine_is_told_apart() -> None:
    known = factors()
    assert all(abs(factor - 1.0) < 0.01 for factor in known.values())
    slow = factors(gemm_efficiency=0.85, memory_efficiency=0.85, nvlink_efficiency=0.7, network_efficiency=0.8)
    assert slow["kernels"] == pytest.approx(1 / 0.85, rel=0.05)
    assert slow["links inside a machine"] == pytest.approx(1 / 0.7, rel=0.1)
    assert slow["links between machines"] == pytest.approx(1 / 0.8, rel=0.1)
    assert slow["launches and work of the host"] == pytest.approx(1.0, rel=0.01)


def test_a_file_is_what_calibrate_takes(tmp_path: Path) -> None:
    path, spec = tmp_path / "measured.json", tmp_path / "spec.yaml"
    found = measured(network_efficiency=0.7)
    path.write_text(json.dumps(measures_to_dict(found)), encoding="utf-8")
    assert is_measures(path)
    assert read_measures(path).rows == found.rows
    spec.write_text(Path(SPEC.path or "").read_text(encoding="utf-8"), encoding="utf-8")
    told = run("calibrate", str(path), "--spec", str(spec), "-o", str(tmp_path / "profile.yaml"))
    assert "links between machines 1.3" in " ".join(told.stdout.split()), told.output
    profile = (tmp_path / "profile.yaml").read_text(encoding="utf-8")
    assert "15 times of `topoplan measure`" in profile
    assert '"nccl": "2.27.5"' in profile
    ranked = run("rank", str(spec), "--pin", "tp=8,pp=1", "--profile", str(tmp_path / "profile.yaml"))
    assert ranked.exit_code == 0, ranked.output


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"gpu": ""}, "was measured on processors"),
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, "is of a100-sxm-80gb, and the cluster has h100-sxm-80gb"),
        ({"nodes": 2}, "is of 2 x 8 GPUs, and the cluster has 4 x 8"),
    ],
)
def test_what_is_of_another_machine_is_refused(about: dict[str, Any], says: str) -> None:
    found = replace(measured(), about={**ABOUT, **about})
    with pytest.raises(InputError, match=says):
        learn_from([], measures=[(SPEC, found)])


@pytest.mark.parametrize("rows", [[{"kind": "copy"}], [{"kind": "copy", "seconds": -1, "slowest_s": 1, "bytes": 1}], 3])
def test_a_broken_file_ends_in_a_message(rows: Any, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"schema": "topoplan.measure/1", "about": ABOUT, "rows": rows}), encoding="utf-8")
    with pytest.raises(InputError, match="is not whole"):
        read_measures(path)
