"""What ms-swift contributes to the rest of a bundle."""

import json
from typing import Any

import pytest

from tests.bundle.samples import ONE_NODE, QWEN3_VL_8B, make_spec_and_plan
from tests.trainers.swift.plans import SAMPLES, WITH_MEMORY, files_for
from topoplan.trainers.registry import written_by
from topoplan.trainers.swift.sft import DEEPSPEED_FILE, FSDP_FILE
from topoplan.trainers.trainer import DATASET_TO_FILL_IN, TrainerRun


def run_of(edited: dict[str, Any] | None = None, *, job: dict[str, Any] | None = None, **layout: Any) -> TrainerRun:
    what = {"cluster": WITH_MEMORY, "job": {"dataset": SAMPLES, **(job or {})}, "backend": "ddp", **layout}
    spec, plan = make_spec_and_plan(**what)
    _, way = written_by(plan.layout.backend, "swift")
    return way.run(spec, plan.layout, {**way.files(spec, plan.layout).values, **(edited or {})})


@pytest.mark.parametrize(
    ("what", "packages"),
    [
        ({}, {"flash-attn"}),
        ({"backend": "deepspeed"}, {"deepspeed", "flash-attn"}),
        ({"backend": "fsdp2"}, {"accelerate", "flash-attn"}),
        ({"job": {"finetuning": "qlora"}}, {"bitsandbytes", "flash-attn"}),
        ({"fused_linear_cross_entropy": True}, {"liger-kernel", "flash-attn"}),
        ({"backend": "mca"}, {"mcore-bridge", "megatron-core", "transformer-engine"}),
    ],
)
def test_a_node_is_searched_for_what_the_run_imports(what: dict[str, Any], packages: set[str]) -> None:
    assert wanted(run_of(**what)) == {"torch", "ms-swift", "pyyaml", *packages}


def wanted(run: TrainerRun) -> set[str]:
    return {one.package.name for one in run.requirements}


def test_what_a_person_has_changed_in_the_yaml_is_what_the_run_wants() -> None:
    run = run_of({"model": "/m", "output_dir": "/o", "dataset": ["/d.jsonl", "org/name"], "max_steps": 7})
    assert (run.model_dir, run.output_dir, run.dataset_files, run.steps) == ("/m", "/o", ("/d.jsonl",), 7)
    assert wanted(run_of({"attn_impl": "sdpa"})) == {"torch", "ms-swift", "pyyaml"}
    assert run_of({"dataset": DATASET_TO_FILL_IN}).dataset == DATASET_TO_FILL_IN


def test_the_allocator_is_the_one_that_memory_was_predicted_with() -> None:
    assert run_of().environment == ()
    for what in ({"expandable_segments": True}, {"backend": "mca"}):
        assert [variable.name for variable in run_of(**what).environment] == ["PYTORCH_CUDA_ALLOC_CONF"]


def test_the_end_of_a_run_saves_nothing_on_top_of_its_checkpoints() -> None:
    for what in ({}, {"backend": "mca"}):
        checkpoint = run_of(**what).checkpoint
        assert checkpoint.final_bytes == 0
        assert checkpoint.total_bytes > checkpoint.hf_bytes > 0
        assert checkpoint.at_once == 3
    assert "of weights at the end" not in files_for()["README.md"]


def test_plan_json_names_the_trainer_where_it_is_not_the_usual_one() -> None:
    assert json.loads(files_for()["plan.json"])["trainer"] == "swift"
    assert json.loads(files_for(backend="mca")["plan.json"])["trainer"] == "swift"
    assert "trainer" not in json.loads(files_for(backend="megatron")["plan.json"])


def test_the_install_commands_bring_what_the_run_imports() -> None:
    readme = files_for(backend="mca", model=QWEN3_VL_8B)["README.md"]
    assert "pip install ms-swift==4.6.0 mcore-bridge==1.6.5 megatron-core==0.16.1 'qwen_vl_utils>=0.0.14'" in readme
    assert "pip install --no-build-isolation 'transformer_engine[pytorch]'\n" in readme
    assert "pip install --no-build-isolation flash-attn==2.8.3\n" in readme
    readme = files_for(backend="deepspeed", job={"finetuning": "qlora"})["README.md"]
    assert "pip install ms-swift==4.6.0 deepspeed bitsandbytes\n" in readme
    assert "qwen_vl_utils" not in readme


def test_nodes_that_could_share_their_tokenised_samples_are_told_how() -> None:
    assert "MODELSCOPE_CACHE" in files_for()["README.md"]
    assert "MODELSCOPE_CACHE" not in files_for(cluster=ONE_NODE)["README.md"]


def test_no_file_speaks_of_another_trainer() -> None:
    for what in ({}, {"backend": "deepspeed"}, {"backend": "fsdp2"}, {"backend": "mca"}):
        for name, text in files_for(**what).items():
            assert name == "plan.json" or "LLaMA-Factory" not in text, name


def test_a_sample_is_shown_as_the_stage_and_the_model_want_it() -> None:
    assert '{"role": "user"' in files_for()["README.md"]
    assert '{"role": "user"' not in files_for(job={"stage": "pt"})["README.md"]
    assert '"images"' not in files_for()["README.md"]
    assert '"images": ["path"]' in files_for(model=QWEN3_VL_8B)["README.md"]


def test_a_checkpoint_of_adapters_has_them_alone_and_a_copy_of_what_layers_share_for_hugging_face() -> None:
    lora = {"finetuning": "lora", "lora_rank": 16}
    found = run_of(job=lora, backend="megatron").checkpoint
    # Qwen3-8B: 36 layers; qkv 4096 -> 6144, proj 4096 -> 4096, fc1 4096 -> 24576, fc2 12288 -> 4096
    trained = 36 * 16 * (4096 + 6144 + 2 * 4096 + 4096 + 24576 + 12288 + 4096)
    assert (found.what, found.megatron_bytes, found.optimizer_bytes) == ("adapters", 2 * trained, 12 * trained)
    assert found.hf_bytes == 2 * (trained + 36 * 16 * 3 * 4096)
    merged = run_of({"merge_lora": True}, job=lora, backend="megatron").checkpoint
    assert merged.hf_bytes == run_of(backend="megatron").checkpoint.hf_bytes
    assert "adapters for Megatron" in files_for(job=lora, backend="megatron")["README.md"]


def config_for(name: str, **what: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files_for(**what)[name])
    return found


def test_each_backend_has_its_own_file_and_ddp_none() -> None:
    for backend, names in {"ddp": set(), "deepspeed": {DEEPSPEED_FILE}, "fsdp2": {FSDP_FILE}}.items():
        assert {DEEPSPEED_FILE, FSDP_FILE} & set(files_for(backend=backend)) == names


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_and_its_offload_are_those_of_the_layout(stage: int) -> None:
    zero = config_for(DEEPSPEED_FILE, backend="deepspeed", zero_stage=stage, offload_optimizer=True)[
        "zero_optimization"
    ]
    assert zero["stage"] == stage
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in zero


def test_fsdp2_is_told_of_offload_in_the_string_that_ms_swift_hands_on() -> None:
    assert config_for(FSDP_FILE, backend="fsdp2")["fsdp"] == "full_shard auto_wrap"
    assert config_for(FSDP_FILE, backend="fsdp2", offload=True)["fsdp"] == "full_shard auto_wrap offload"


def test_four_bit_weights_are_read_by_every_rank() -> None:
    def efficient(finetuning: str) -> bool:
        job = {"finetuning": finetuning}
        loads: bool = config_for(FSDP_FILE, backend="fsdp2", job=job)["fsdp_config"]["cpu_ram_efficient_loading"]
        return loads

    assert efficient("lora")
    assert not efficient("qlora")
