"""A plan.json gives the same bundle again, byte for byte; an edited one gives another bundle, or an error."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.sizes import examples, some
from topoplan.bundle.bundle import generate
from topoplan.bundle.plan_file import read_plan_file, recorded_plan, written_again
from topoplan.bundle.slurm import JOB_SCRIPT
from topoplan.bundle.write import MANIFEST, write_bundle
from topoplan.errors import InputError, LayoutError, ModelError, SpecError
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.planner.search import rank
from topoplan.specs.json_source import parse_json
from topoplan.specs.load import load_spec
from topoplan.specs.spec import Spec
from topoplan.trainers.trainer import PLAN_FILE

SPECS = Path(__file__).parents[2] / "cluster_specs"

OWN = """\
name: own-2x8
nodes: 2
gpus_per_node: 8
gpu: {name: h100-sxm-80gb, memory: 94GiB}
nvlink_bandwidth: 900GB/s
ib_bandwidth: 400Gb/s
nics_per_node: 8
host_memory: 2TB
cpu_cores: 192
margin: 0%
env: {NCCL_P2P_LEVEL: NVL, TITLE: 'é "ü" 日本'}
fabric: {kind: roce, rails: 8, nodes_per_leaf: 2, oversubscription: 2}
profile: own profile.yaml
hosts:
- {address: n0, user: ada, port: 2222, workdir: /data/a b, venv: /opt/ü, socket_interface: eth0, hcas: [mlx5_0]}
- {address: n1}
model: MODEL
job:
  seq_len: 4096
  global_batch_size: 64
  dataset: 日本 data
  epochs: 2
  trainer: {additional_configs: {window_size: [1, 2.0, {b: null, "x y": true}], timers: "1e5", init_method_std: 1e-8},
    save_steps: 5, run_name: "ünï \\U0001F600 \\u2028"}
"""
PROFILE = "gpu: hopper\nsource: my machine\ngemm_tile: [128, 128]\ncontext_bytes: 1GiB\nkernel_launch_s: 0\n"


def own_spec(directory: Path, model: str = "Qwen/Qwen3-8B", *overrides: str, pins: str = "") -> Spec:
    (directory / "own profile.yaml").write_text(PROFILE)
    (directory / "spec.yaml").write_text(OWN.replace("MODEL", model))
    return load_spec(directory / "spec.yaml", overrides=overrides, pins=pins)


def again(files: dict[str, str]) -> dict[str, str]:
    return written_again(recorded_plan(parse_json(files[PLAN_FILE], name="plan.json")))


def assert_comes_back(spec: Spec, plan: Plan) -> dict[str, str]:
    files = generate(spec, plan)
    recorded = recorded_plan(parse_json(files[PLAN_FILE], name="plan.json"))
    assert all(note.startswith("does not fit") for note in recorded.notes)
    assert bool(recorded.notes) != plan.fits
    assert list(written_again(recorded).items()) == list(files.items())
    return files


# Byte for byte -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", some(sorted(SPECS.glob("*.yaml")), 3), ids=lambda path: path.stem)
def test_bundles_of_every_shipped_spec_come_back(path: Path) -> None:
    # For large clusters, a complete search takes seconds.
    spec = load_spec(path, pins="cp=1,micro_batch_size=1")
    plans = rank(spec).plans
    for place in sorted({0, len(plans) // 2, len(plans) - 1}):
        assert_comes_back(spec, plans[place])
    # Predicted with all stages, as by `--plan ID` and `topoplan.predict`.
    assert_comes_back(spec, predict(spec, plans[0].layout))


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"tp": 4, "pp": 2, "vpp": 3, "micro_batch_size": 2, "recompute": "selective"},
        {"tp": 2, "pp": 4, "vpp": 2, "pipeline_layout": "Et*4|t*5|t*4|t*5|t*5|t*4|t*5|t*4L"},
        {
            "cross_entropy_fusion": True,
            "optimizer_offload_fraction": 0.37,
            "recompute": {"method": "block", "num_layers": 30},
        },
        {"tp": 2, "cp": 2, "sequence_parallel": False, "overlap_grad_reduce": False},
        {"tp": 8, "distributed_optimizer": False, "recompute": {"modules": ["mlp", "core_attn"]}},
    ],
    ids=str,
)
def test_a_spec_with_everything_in_it_comes_back_in_any_layout(tmp_path: Path, layout: dict[str, Any]) -> None:
    spec = own_spec(tmp_path)
    files = assert_comes_back(spec, predict(spec, layout))
    assert "日本" in files[PLAN_FILE]


@pytest.mark.parametrize(
    ("model", "overrides", "layout"),
    [
        ("Qwen/Qwen3-8B", ["packing=true", "trainer.neat_packing=true"], {"tp": 2}),
        ("Qwen/Qwen3-8B", ["stage=pt"], {"tp": 2}),
        ("Qwen/Qwen3-8B", ["stage=dpo", "samples=1000"], {"tp": 2}),
        ("Qwen/Qwen3-8B", ["precision=fp8"], {"tp": 2, "fp8_param": True}),
        ("Qwen/Qwen3-8B", ["lengths={512: 1000, 1024: 300, 9000: 7}"], {"tp": 2}),
        ("Qwen/Qwen3-8B", ["lengths=[[512, 1000], [1024, 300]]", "packing=true"], {"tp": 2}),
        ("Qwen/Qwen2.5-VL-7B-Instruct", ["freeze_vision_tower=false", "images_per_sequence=0"], {"tp": 4}),
        ("Qwen/Qwen3-30B-A3B", ["token_imbalance=1.3"], {"tp": 2, "ep": 8}),
        ("Qwen/Qwen3-30B-A3B", [], {"tp": 1, "pp": 2, "ep": 4, "etp": 1}),
        ("deepseek-ai/DeepSeek-V3", ["mtp_num_layers=1"], {"tp": 2, "pp": 8, "ep": 1, "etp": 2}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", [], {"tp": 2, "ep": 8}),
    ],
    ids=str,
)
def test_jobs_and_models_of_every_kind_come_back(
    tmp_path: Path, model: str, overrides: list[str], layout: dict[str, Any]
) -> None:
    spec = own_spec(tmp_path, model, *overrides)
    assert_comes_back(spec, predict(spec, layout))


def test_a_job_script_comes_back(tmp_path: Path) -> None:
    spec = own_spec(tmp_path, "Qwen/Qwen3-8B", "slurm={partition: 'a b', requeue: true, time: '24:00:00'}")
    files = generate(spec, predict(spec, {"tp": 2}), "slurm")
    assert JOB_SCRIPT in files
    assert list(again(files).items()) == list(files.items())


def test_pins_come_back(tmp_path: Path) -> None:
    spec = own_spec(tmp_path, pins="tp=2,recompute.granularity=full,recompute.method=block,recompute.num_layers=2")
    assert_comes_back(spec, rank(spec).plans[0])


def test_the_lengths_of_a_data_set_come_back_without_the_data_set(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.json"}}))
    records = [{"instruction": "a " * (index % 90 + 1), "output": "b " * (index * 7 % 300)} for index in range(500)]
    (data / "mine.json").write_text(json.dumps(records))
    spec = own_spec(tmp_path, "Qwen/Qwen3-8B", "dataset=mine", f"dataset_dir={data}")
    assert spec.job.lengths is not None
    files = generate(spec, predict(spec, {"tp": 2}))
    (data / "mine.json").unlink()
    assert again(files) == files


def test_a_model_in_a_directory_comes_back_without_the_directory(tmp_path: Path) -> None:
    from topoplan.catalog import model_config

    model = tmp_path / "my model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(model_config("Qwen/Qwen3-8B")))
    spec = own_spec(tmp_path, str(model))
    files = generate(spec, predict(spec, {"tp": 2}))
    (model / "config.json").unlink()
    assert again(files) == files


def test_whole_numbers_in_the_place_of_floats_stay_whole_numbers(tmp_path: Path) -> None:
    spec = own_spec(tmp_path)
    gpu = replace(spec.cluster.gpu, bf16_flops=989 * 10**12)
    spec = replace(spec, cluster=replace(spec.cluster, gpu=gpu), job=replace(spec.job, epochs=2, learning_rate=1))
    files = assert_comes_back(spec, predict(spec, {"tp": 2}))
    assert '"epochs": 2,' in files[PLAN_FILE]


# The file ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(example(), tmp_path / "bundle")
    return tmp_path / "bundle"


@cache
def example() -> dict[str, str]:
    spec = load_spec(SPECS / "h100-4x8.yaml")
    return generate(spec, predict(spec, {"tp": 4, "pp": 2, "micro_batch_size": 2}))


@cache
def example_plan() -> dict[str, Any]:
    return dict(json.loads(example()[PLAN_FILE]))


def test_the_file_or_its_directory_will_do(bundle: Path, tmp_path: Path) -> None:
    for path in (bundle, bundle / PLAN_FILE, str(bundle)):
        recorded = read_plan_file(path)
        assert recorded.version == topoplan.__version__
        assert recorded.scheduler is None
        assert recorded.plan.layout.tp == 4
        assert recorded.spec.cluster.name == "h100-4x8"
    write_bundle(written_again(recorded), tmp_path / "second")
    first, second = ({path.name: path.read_bytes() for path in at.iterdir()} for at in (bundle, tmp_path / "second"))
    assert first == second
    assert {MANIFEST, "hosts.json", "README.md"} < set(first)


def test_ten_thousand_nodes_with_their_hosts_are_not_too_many(tmp_path: Path) -> None:
    document = copy.deepcopy(example_plan())
    host = {
        "user": "ada",
        "port": 22,
        "workdir": "/data/" + "x" * 200,
        "hcas": [f"mlx5_{index}" for index in range(8)],
    }
    document["inputs"]["cluster"] |= {
        "nodes": 10_000,
        "hosts": [{"address": f"n{index}", **host} for index in range(10_000)],
    }
    document["inputs"]["job"]["global_batch_size"] = 20_000
    document["inputs"]["job"]["samples"] = None
    document["layout"] |= {"dp": 10_000, "gradient_accumulation_steps": 1}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document, indent=2))
    assert path.stat().st_size > 1_000_000
    assert read_plan_file(path).spec.cluster.hosts[9_999].address == "n9999"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"is not JSON"),
        ("name: h100-4x8\n", r"plan\.json:1: is not JSON: .*; give the plan\.json of a bundle, or its directory"),
        ("[]", r"holds a list; expected a JSON object; give the plan\.json"),
        ("{}", r"is not a plan\.json: no `schema` of topoplan; give the plan\.json of a bundle, or its directory"),
        ('{"schema": 1}', r"is not a plan\.json: no `schema`"),
        ('{"schema": "topoplan.rank/1"}', r"plan\.json:1: is not a plan\.json but the output of `topoplan rank`"),
        ('{"schema": "topoplan.hosts/1"}', r"is not a plan\.json but the hosts\.json of a bundle"),
        (
            '{"schema": "topoplan.plan/0"}',
            r"has an unknown schema, topoplan\.plan/0; topoplan [0-9.]+ reads topoplan\.plan/1$",
        ),
        (
            '{"schema": "topoplan.plan/2",\n"version": "7.1", "new": 1}',
            r"plan\.json:1: was written by a newer topoplan \(7\.1\): its schema is topoplan\.plan/2;"
            r" topoplan [0-9.]+ reads topoplan\.plan/1; update topoplan$",
        ),
        ('{"schema": "topoplan.plan/2"}', r"was written by a newer topoplan: its schema"),
        ('{"schema": "topoplan.plan/1"}', r"plan\.json: `version` is missing"),
        ('{"schema": "topoplan.plan/1", "version": 1}', r"version: 1 is not text"),
        ('{"schema": "topoplan.plan/1", "version": "1", "layout": {}}', r"`inputs` is missing"),
        ('{"schema": "topoplan.plan/1", "version": "1", "inputs": {}, "layout": []}', r"layout: a list is not a block"),
        ('{"schema": "topoplan.plan/1", "version": "1", "layuot": {}}', r"unknown key 'layuot'; did you mean 'layout'"),
        (
            '{"schema": "topoplan.plan/1", "version": "7.1", "wings": 2}',
            r"unknown key 'wings'; topoplan '7\.1' wrote it, this is",
        ),
    ],
)
def test_another_file_says_what_it_is(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / PLAN_FILE).write_text(text)
    with pytest.raises(SpecError, match=message) as error:
        read_plan_file(tmp_path)
    assert "\n" not in str(error.value)


def test_a_directory_without_a_plan_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is not a bundle: no plan.json"), (tmp_path / "absent.json", "no such file")):
        with pytest.raises(SpecError, match=message):
            read_plan_file(path)


def test_a_bundle_that_was_written_without_the_scheduler_of_its_spec_is_written_so_again() -> None:
    spec = load_spec(SPECS / "h100-4x8.yaml", overrides=["slurm.partition=gpu"])
    plan = predict(spec, {"tp": 4, "pp": 2, "micro_batch_size": 2})
    for asked in (None, "none"):
        files = generate(spec, plan, asked)
        again = written_again(recorded_plan(parse_json(files[PLAN_FILE], name=PLAN_FILE)))
        assert again == files
        assert (JOB_SCRIPT in again) == (asked is None)


def test_a_scheduler_that_is_not_known_is_refused() -> None:
    assert recorded_plan(source({"scheduler": None})).scheduler is None
    with pytest.raises(SpecError, match=r"^plan\.json:\d+: scheduler: 'lsf'; expected"):
        recorded_plan(source({"scheduler": "lsf"}))
    with pytest.raises(SpecError, match="scheduler: a list; expected"):
        recorded_plan(source({"scheduler": []}))


# Edited by hand ------------------------------------------------------------------------------------------------------


def source(changes: dict[str, Any]) -> Any:
    """Return the example's plan with some keys changed, such as `layout.tp` or `inputs.job.stage`."""
    document = copy.deepcopy(example_plan())
    for path, value in changes.items():
        *blocks, last = path.split(".")
        inner = document
        for block in blocks:
            inner = inner[block]
        inner[last] = value
    return parse_json(json.dumps(document, indent=2), name="plan.json")


def test_a_layout_may_be_changed_and_is_predicted_again() -> None:
    recorded = recorded_plan(source({"layout.tp": 8, "layout.dp": 2, "layout.gradient_accumulation_steps": 16}))
    assert recorded.plan.layout.tp == 8
    assert recorded.notes[0] == "the layout is that of tp8-pp2-dp2-mbs2, but `id` is tp4-pp2-dp4-mbs2"
    assert recorded.notes[1].startswith("memory: ")
    assert recorded.notes[2].startswith("time: ")
    assert len(recorded.notes) == 3
    assert "tp8-pp2-dp2-mbs2" in written_again(recorded)["README.md"]


def test_another_version_writes_its_own_files_and_says_so() -> None:
    recorded = recorded_plan(source({"version": "0.0.9"}))
    assert recorded.notes == (
        f"the plan is from topoplan 0.0.9; {topoplan.__version__} may write its files differently",
    )
    assert written_again(recorded) == example()


def test_a_prediction_that_another_version_saw_otherwise_is_made_again() -> None:
    step_s = example_plan()["prediction"]["time"]["step_s"]
    recorded = recorded_plan(source({"prediction.time.step_s": 99.5, "prediction.warnings": ["old"]}))
    assert recorded.notes == (
        f"time: {step_s:.3g} s per step, but the plan has 99.5",
        "a new prediction differs from the plan in warnings",
    )
    assert written_again(recorded) == example()


def test_a_plan_that_does_not_fit_is_written_with_a_note() -> None:
    recorded = recorded_plan(source({"inputs.cluster.gpu.memory_bytes": 2**34}))
    assert recorded.notes[-1].startswith("does not fit: ")
    assert recorded.notes[-1].endswith(" GiB on a card of 16.0 GiB")
    assert written_again(recorded)["train.yaml"] == example()["train.yaml"]


@pytest.mark.parametrize("prediction", [None, 1, [], {"memory": {"by_stage": 3}, "time": []}], ids=str)
def test_what_is_not_read_may_be_anything(prediction: Any) -> None:
    assert (
        written_again(recorded_plan(source({"prediction": prediction, "id": None, "run": 7}))).keys()
        == example().keys()
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout.tp": "four"}, LayoutError, r"layout\.tp: 'four' is not a whole number"),
        ({"layout.dp": 8}, LayoutError, r"layout\.dp: tp 4 \* pp 2 \* cp 1 \* dp 8 = 64, the cluster has 32 GPUs"),
        (
            {"layout.backend": "megatron", "trainer": "llamafactory"},
            LayoutError,
            r"no llamafactory bundle can be written for the backend 'megatron'",
        ),
        ({"layout.pipeline_layout": "Et*3|L"}, LayoutError, r"layout breaks rule|layout"),
        (
            {"layout.recompute": {"granularity": "some"}},
            LayoutError,
            r"layout\.recompute\.granularity: 'some' is not a choice",
        ),
        ({"inputs.cluster.hosts": [{"address": "n0"}]}, SpecError, r"hosts: 1 hosts for 4 nodes"),
        ({"inputs.cluster.name": "a\nb"}, SpecError, r"name: 'a\\nb' holds a line break"),
        ({"inputs.cluster.nodes": 3}, LayoutError, r"layout\.dp: .* = 32, the cluster has 24 GPUs"),
        ({"inputs.cluster.fabric": {"rails": 0}}, SpecError, r"rails: 0 is out of range"),
        ({"inputs.job.trainer": {"no_such": 1}}, SpecError, r"job\.trainer\.no_such: the trainer has no key 'no_such'"),
        ({"inputs.job.finetuning": "lora"}, SpecError, r"finetuning 'lora' with backend mca: LLaMA-Factory's trainer"),
        ({"inputs.model.model_type": "gpt9"}, ModelError, r"does not train 'gpt9'"),
        ({"inputs.model.hidden_size": "wide"}, SpecError, r"inputs\.model\.hidden_size: 'wide' is not a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_its_line(changes: dict[str, Any], error: type[InputError], message: str) -> None:
    document = source(changes)
    with pytest.raises(error, match=message) as found:
        written_again(recorded_plan(document))
    assert str(found.value).startswith("plan.json:")
    assert "\n" not in str(found.value)


def test_a_message_has_the_line_of_the_key() -> None:
    document = source({"layout.dp": 8})
    line = document.lines[("layout", "dp")]
    with pytest.raises(LayoutError, match=rf"^plan\.json:{line}: layout\.dp: "):
        recorded_plan(document)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from paths(item, (*path, key))


@cache
def full_plan() -> dict[str, Any]:
    """Return the plan of a mixture of experts, with hosts, lengths and a user's own profile."""
    with TemporaryDirectory() as directory:
        spec = own_spec(Path(directory), "Qwen/Qwen3-30B-A3B", "lengths={512: 1000, 1024: 300}", pins="tp=2")
    return dict(json.loads(generate(spec, predict(spec, {"tp": 2, "ep": 4}))[PLAN_FILE]))


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0, 1, 2, 10**400, 1e300])
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.sampled_from([[], {}, [1], "70%", "4"])
EDITS = st.tuples(st.integers(0, 10**6), st.sampled_from(["set", "remove", "add"]), VALUES)


@settings(max_examples=examples(300))
@given(st.sampled_from([example_plan, full_plan]), st.lists(EDITS, max_size=3))
def test_an_edited_plan_gives_a_bundle_or_one_error(
    plan: Callable[[], dict[str, Any]], edits: list[tuple[int, str, Any]]
) -> None:
    document: Any = copy.deepcopy(plan())
    for number, what, value in edits:
        places = list(paths(document))
        *blocks, last = places[number % len(places)] if places else [what]
        inner = document
        for block in blocks:
            inner = inner[block]
        if what == "remove" and places:
            del inner[last]
        elif what == "set" or isinstance(inner, list):
            inner[last] = copy.deepcopy(value)
        else:
            inner["more"] = copy.deepcopy(value)
    try:
        files = written_again(recorded_plan(parse_json(json.dumps(document), name="plan.json")))
    except InputError as error:
        assert str(error).startswith("plan.json")  # noqa: PT017
        return
    # Writing again gives the file that was read.
    assert again(files) == files
    for text in files.values():
        text.encode()
