"""Bundles for DeepSpeed, FSDP2 and plain data parallelism."""

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, HOSTS, QWEN3_8B, QWEN3_VL_8B, make_plan, make_spec_and_plan
from tests.bundle.shell_scripts import assert_sound
from topoplan.bundle.bundle import generate
from topoplan.bundle.plan_file import RecordedPlan, recorded_plan, written_again
from topoplan.errors import SpecError
from topoplan.specs.json_source import parse_json
from topoplan.trainers.llamafactory.key_list import plain_keys
from topoplan.trainers.llamafactory.plain import plain_run, plain_trainer_files, written_keys
from topoplan.trainers.llamafactory.user_keys import fixed_values
from topoplan.trainers.trainer import TrainerRun

WITH_HOSTS = replace(CLUSTER, hosts=HOSTS, host_memory_bytes=2**41)
BACKENDS: dict[str, dict[str, Any]] = {
    "ddp": {"backend": "ddp"},
    "deepspeed": {"backend": "deepspeed", "zero_stage": 3, "offload_optimizer": True},
    "fsdp2": {"backend": "fsdp2"},
}


def bundle(**what: Any) -> dict[str, str]:
    return generate(*make_spec_and_plan(**{"model": QWEN3_8B, "cluster": WITH_HOSTS, **what}))


def run(**what: Any) -> TrainerRun:
    spec, plan = make_spec_and_plan(**{"model": QWEN3_8B, **what})
    return plain_run(spec, plan.layout, plain_trainer_files(spec, plan.layout).values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bundle_has_all_its_files_and_is_always_the_same(backend: str) -> None:
    files = bundle(**BACKENDS[backend])
    own = {"ddp": [], "deepspeed": ["ds_config.json"], "fsdp2": ["accelerate.yaml"]}[backend]
    scripts = [f"node-{node:02d}.sh" for node in range(4)]
    assert list(files) == ["train.yaml", *own, *scripts, "hosts.json", "plan.json", "README.md"]
    assert bundle(**BACKENDS[backend]) == files
    for name in own:
        assert f"`{name}`" in files["README.md"]
        assert f"{name} is missing or empty in $bundle_dir" in files["node-00.sh"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scripts_do_not_train_with_megatron(backend: str) -> None:
    script = bundle(**BACKENDS[backend])["node-02.sh"]
    assert "export USE_MCA=0\n" in script
    assert "mcore_adapter" not in script
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in script


def test_each_backend_is_started_in_its_own_way() -> None:
    def start(backend: str) -> str:
        return bundle(**BACKENDS[backend])["node-02.sh"].partition("\nexec ")[2]

    assert start("ddp").startswith('"$python" -m torch.distributed.run')
    assert '  -m llamafactory.launcher "$bundle_dir/train.yaml" ' in start("ddp")
    assert "--nnodes 4 --node_rank 2 --nproc_per_node 8" in start("deepspeed")
    assert "ds_config.json" in start("deepspeed")
    assert start("fsdp2").startswith(
        '"$python" -m accelerate.commands.launch --config_file "$bundle_dir/accelerate.yaml"'
    )
    assert "--num_machines 4 --machine_rank 2 --num_processes 32" in start("fsdp2")


def test_the_path_of_the_deepspeed_file_survives_any_directory() -> None:
    import yaml

    last = bundle(**BACKENDS["deepspeed"])["node-00.sh"].splitlines()[-1]
    words = last.partition('"$bundle_dir/train.yaml"')[2]
    for directory in ("/data/it's: a #1", "/a b", '/x"y', "/$HOME/[1]"):
        command = ["bash", "-c", f"bundle_dir=$1; printf %s {words}", "bash", directory]
        word = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        key, _, value = word.partition("=")
        assert (key, yaml.safe_load(value)) == ("deepspeed", f"{directory}/ds_config.json")


def test_the_allocator_is_set_where_the_plan_has_it() -> None:
    assert "expandable_segments" not in bundle(backend="ddp")["node-00.sh"]
    assert (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        in bundle(backend="ddp", expandable_segments=True)["node-00.sh"]
    )


def wanted(run: TrainerRun) -> list[str]:
    return [one.package.name for one in run.requirements]


def test_what_a_run_imports_is_looked_for() -> None:
    usual = ["torch", "llamafactory", "accelerate", "peft"]
    assert wanted(run(backend="ddp")) == usual
    assert wanted(run(backend="deepspeed")) == [*usual, "deepspeed"]
    assert wanted(run(backend="ddp", job={"finetuning": "qlora"})) == [*usual, "bitsandbytes"]
    assert wanted(run(backend="ddp", job={"optimizer": "adamw_8bit"})) == [*usual, "bitsandbytes"]
    liger = run(backend="ddp", fused_linear_cross_entropy=True)
    assert wanted(liger) == [*usual, "liger-kernel"]
    assert liger.readme.install == ("pip install llamafactory==0.9.5 liger-kernel",)


def test_quantized_weights_are_for_adapters() -> None:
    assert run(backend="ddp").refuses_quantized is not None
    assert run(backend="ddp", job={"finetuning": "lora"}).refuses_quantized is None


def test_plan_json_names_no_trainer_where_it_is_the_usual_one() -> None:
    plan = json.loads(bundle(backend="ddp")["plan.json"])
    assert "trainer" not in plan
    assert plan["trainer_versions"] == {"llamafactory": "0.9.5", "transformers": ["4.55.0", "5.6.0"]}
    assert plan["layout"]["backend"] == "ddp"


def test_the_readme_says_what_runs_and_how_to_install_it() -> None:
    readme = bundle(**BACKENDS["deepspeed"])["README.md"]
    assert "A training run of LLaMA-Factory on DeepSpeed ZeRO-3, planned" in readme
    assert "pip install llamafactory==0.9.5 deepspeed\n" in readme
    assert "adapter" not in readme
    assert "Megatron" not in readme


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_script_passes_bash_and_shellcheck(backend: str) -> None:
    assert_sound(bundle(**BACKENDS[backend])["node-00.sh"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bundle_is_written_again_from_its_plan_json(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, plan = make_spec_and_plan(model=QWEN3_8B, cluster=WITH_HOSTS, **BACKENDS[backend])
    # Tests what is recorded and read back, independent of predictions for such layouts.
    monkeypatch.setattr("topoplan.bundle.plan_file.predict", lambda spec, layout, **_: make_plan(layout))
    for scheduler in (None, "slurm"):
        spec = replace(spec, cluster=replace(spec.cluster, hosts=() if scheduler else HOSTS))
        files = generate(spec, plan, scheduler, "llamafactory")
        recorded = recorded_plan(parse_json(files["plan.json"], name="plan.json"))
        assert (recorded.plan.layout, recorded.trainer) == (plan.layout, None)
        assert written_again(recorded) == files


def test_a_plan_json_with_another_trainer_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topoplan.bundle.plan_file.predict", lambda spec, layout, **_: make_plan(layout))
    document = json.loads(bundle(backend="ddp")["plan.json"])

    def read(trainer: object) -> RecordedPlan:
        text = json.dumps(document | {"trainer": trainer})
        return recorded_plan(parse_json(text, name="plan.json"))

    assert read("swift").trainer == "swift"
    assert read(None).trainer is None
    with pytest.raises(SpecError, match=r"trainer: 'axolotl'; expected llamafactory, swift, trinity, null"):
        read("axolotl")


def test_every_key_that_the_plan_decides_is_one_of_the_trainer() -> None:
    for backend in ("ddp", "deepspeed", "fsdp2"):
        for finetuning in ("full", "freeze", "lora", "qlora"):
            spec, plan = make_spec_and_plan(model=QWEN3_VL_8B, backend=backend, job={"finetuning": finetuning})
            assert fixed_values(spec, written_keys(spec, plan.layout)).keys() <= plain_keys().keys()


WITH_MEMORY = replace(CLUSTER, host_memory_bytes=2**41)


def test_what_stands_in_the_file_beside_is_a_part_of_the_runs_name() -> None:
    def run(**what: Any) -> str:
        spec, plan = make_spec_and_plan(model=QWEN3_8B, cluster=WITH_MEMORY, backend="deepspeed", **what)
        return plain_trainer_files(spec, plan.layout).run_name.rpartition("-")[2]

    assert run(zero_stage=3) == run(zero_stage=3) != run(zero_stage=2)
    assert run(zero_stage=3, offload_optimizer=True) != run(zero_stage=3)
