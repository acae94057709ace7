"""Logs become a profile that a spec can name, and that is refused where it does not apply."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.samples import make_spec
from topoplan.errors import InputError
from topoplan.layout.forms import layout_from_dict
from topoplan.planner.fragmentation import learn
from topoplan.planner.learn import Lesson, Lessons, learn_from, peaks_of, reordered
from topoplan.planner.logged import Logged
from topoplan.planner.predict import predict
from topoplan.planner.search import rank
from topoplan.planner.view import spec_to_dict
from topoplan.report.calibration import calibrated_text
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.load import load_spec
from topoplan.specs.profile import read_profile
from topoplan.units import GIB

SPEC = make_spec(nodes=1, model_name="/home/someone/models/Qwen3-8B")
FORMS = (
    {"tp": 1, "micro_batch_size": 1, "recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}},
    {"tp": 8, "micro_batch_size": 2, "sequence_parallel": True},
)


def lesson(form: dict[str, object], factor: float, **changes: object) -> Lesson:
    """Return a log of a layout whose steps took longer than predicted by a factor."""
    layout = layout_from_dict({"backend": "mca", **form}, SPEC.cluster, SPEC.model, SPEC.job)
    plan = predict(SPEC, layout)
    logged = Logged(
        name="/home/someone/trainer_log.jsonl",
        writer="llamafactory",
        first=1,
        last=20,
        total=20,
        step_s=factor * plan.time.step_s,
        spread=0.02,
        error=0.005,
        steps=19,
        left_out={"first": 1},
        allocated_bytes=None,
        reserved_bytes=None,
        batch=None,
    )
    return Lesson(spec=SPEC, plan=plan, logged=replace(logged, **changes))  # type: ignore[arg-type]


def learnt(*factors: float, **changes: object) -> Lessons:
    return learn_from([lesson(form, factor, **changes) for form, factor in zip(FORMS, factors, strict=False)])


@pytest.fixture(scope="module")
def taught() -> Lessons:
    return learnt(1.2, 1.3, allocated_bytes=40.0 * GIB, reserved_bytes=46.0 * GIB)


@pytest.fixture
def profile(tmp_path: Path, taught: Lessons) -> Path:
    path = tmp_path / "profile.yaml"
    path.write_text(calibrated_text(taught.profile))
    return path


def spec_with(profile: Path, gpu: str = "h100-sxm-80gb") -> str:
    path = profile.with_name("cluster.yaml")
    path.write_text(
        f"gpu: {gpu}\nnodes: 1\ngpus_per_node: 8\nprofile: {profile.name}\nmodel: Qwen/Qwen3-8B\n"
        "job: {seq_len: 4096, global_batch_size: 64}\n"
    )
    return str(path)


def test_a_profile_says_where_it_is_from_and_nothing_of_the_machine(profile: Path) -> None:
    text = profile.read_text()
    assert "someone" not in text
    read = read_profile(profile)
    assert (read.gpu, read.calibrated.trainer, len(read.calibrated.measured)) == ("h100-sxm-80gb", "llamafactory", 2)
    assert read.calibrated.measured[0].model == "Qwen3-8B"
    assert read.calibrated.versions["llamafactory"]
    found = profile_of(SPEC.cluster.gpu, read)
    assert found.origins["gemm_efficiency"].kind == "calibrated"
    assert found.gemm_efficiency < profile_of(SPEC.cluster.gpu).gemm_efficiency
    assert 0.03 <= found.time_band < 0.11


def test_a_spec_that_names_it_is_planned_for_its_trainer(profile: Path) -> None:
    spec = load_spec(spec_with(profile))
    assert spec.trainer == "llamafactory"
    plain = replace(spec, profile=None)
    assert predict(spec, {"tp": 8}).time.step_s > 1.1 * predict(plain, {"tp": 8}).time.step_s
    assert "constants from 2 runs on this cluster" in " ".join(predict(spec, {"tp": 8}).warnings)
    again = json.loads(json.dumps(spec_to_dict(spec, whole=True)))
    assert again["profile"]["calibrated"]["trainer"] == "llamafactory"


def test_it_is_refused_for_another_gpu_trainer_or_version(profile: Path) -> None:
    with pytest.raises(InputError, match="the profile is of h100-sxm-80gb, and the cluster has a100"):
        load_spec(spec_with(profile, "a100-sxm-80gb"))
    spec = load_spec(spec_with(profile))
    with pytest.raises(InputError, match="calibrated with llamafactory, and the trainer is swift"):
        predict(replace(spec, trainer="swift"), {"backend": "megatron", "tp": 8})
    profile.write_text(profile.read_text().replace('"llamafactory": "', '"llamafactory": "0.'))
    with pytest.raises(InputError, match=r"calibrated with llamafactory 0\.0\.9\.5, and this is 0\.9\.5; calibrate"):
        rank(load_spec(spec_with(profile)))


def test_what_the_order_of_plans_owes_to_it_is_said(profile: Path) -> None:
    assert reordered(rank(load_spec(spec_with(profile)))) == ("the calibrated constants leave the best plan as it was",)
    text = profile.read_text().replace("nvlink_efficiency:", "#")
    profile.write_text(text + "nvlink_efficiency: 0.04\n")
    (said,) = reordered(rank(replace(load_spec(spec_with(profile)), backends=("mca",))))
    assert said.startswith("without the calibrated constants tp")
    assert "because of the links inside a machine, which take" in said


def test_a_ratio_of_logged_peaks_is_the_fragmentation(taught: Lessons) -> None:
    assert taught.profile.constants["fragmentation"] == pytest.approx(0.15, abs=0.005)


def test_without_the_peak_of_tensors_a_part_of_what_is_held_is_theirs() -> None:
    run = lesson(FORMS[0], 1.0)
    before = run.plan.memory.reserved_bytes / run.plan.memory.allocated_bytes
    found = learn([peaks_of(lesson(FORMS[0], 1.0, reserved_bytes=1.1 * run.plan.memory.reserved_bytes))])
    assert 1.05 < (1.0 + found.constants["fragmentation"]) / before < 1.1


def test_logs_without_memory_change_nothing_about_it() -> None:
    found = learn([peaks_of(lesson(FORMS[0], 1.0))])
    assert (found.constants, found.bands, found.off) == ({}, {}, (None,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"writer": "swift"}, "is a log of ms-swift, and the plan is written for LLaMA-Factory"),
        (
            {"writer": "verl"},
            "is a log of verl, as Trinity-RFT writes it, .*; give --trainer trinity",
        ),
        ({"batch": 512}, "has 512 sequences per step, and the job 64"),
        ({"step_s": 100.0}, "a step took 100 s, and"),
    ],
)
def test_logs_of_something_else_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        learnt(1.0, **changes)


def test_logs_are_counted_anew_where_the_spec_has_a_calibrated_profile(taught: Lessons) -> None:
    again = learn_from([replace(one, spec=replace(one.spec, profile=taught.profile)) for one in taught.of])
    assert again.profile.constants == taught.profile.constants
