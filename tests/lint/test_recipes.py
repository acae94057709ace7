"""Published recipes, checked as they are: their claims compared with predictions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.samples import no_search
from topoplan.lint.check import Checked, check, fix
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.planner.plan import Plan
from topoplan.reading.finding import Finding
from topoplan.specs.load import load_cluster

GUIDE = """# 训练脚本参数详细说明

### `CUDA_VISIBLE_DEVICES=0,1,2,3,4`

### `--nproc_per_node=5`

### `--master_port=29500`

### `--no_python`

```bash
torchrun --nproc_per_node=5 --no_python swift sft
```

#### `--model Qwen/Qwen3-30B-A3B-Thinking-2507`

#### `--train_type full`

#### `--torch_dtype bfloat16`

#### `--dataset 'liucong/Chinese-DeepSeek-R1-Distill-data-110k#1000'`

#### `--max_length 4096`

#### `--per_device_train_batch_size 2`

#### `--gradient_accumulation_steps 8`

#### `--gradient_checkpointing true`

#### `--deepspeed zero2`
"""
"""A guide that explains one command flag by flag: full fine-tuning with ZeRO-2 on five cards."""
NOTE = """# 模型训练qwen3-8b的配置要求?

建议使用 8×A100 80GB 或 4×H100 80GB,并配合 ZeRO-3

```json
{
  "train_batch_size": 256,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8,
  "fp16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu"},
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 5e8
  }
}
```
"""
"""A note on what Qwen3-8B needs, with a DeepSpeed file."""
RECIPE = """\
model_name_or_path: Qwen/Qwen2-72B
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds.json
dataset: identity
template: qwen
cutoff_len: 2560
output_dir: saves/a
per_device_train_batch_size: 4
learning_rate: 1.0e-5
fp16: true
"""
"""One machine with eight A100s: ZeRO-3 with everything offloaded, batch 4, 2560 tokens."""
OFFLOADED = {"device": "cpu", "pin_memory": False}
ZERO3 = {"stage": 3, "offload_optimizer": OFFLOADED, "offload_param": OFFLOADED, "overlap_comm": False}

P30, P8, P72 = 30_532_122_624, 8_190_735_360, 72_706_203_648
GIB = 2**30


def a100s(**keys: str) -> PredictionTarget:
    overrides = [f"{key}={value}" for key, value in keys.items()]
    return PredictionTarget(cluster=load_cluster("cluster_specs/a100-1x8.yaml", overrides=overrides))


def checked(tmp_path: Path, against: PredictionTarget, **files: str) -> Checked:
    for name, text in files.items():
        (tmp_path / name.replace("_", ".")).write_text(text, encoding="utf-8")
    return check([str(tmp_path / next(iter(files)).replace("_", "."))], against)


def unsearched(against: PredictionTarget) -> PredictionTarget:
    return replace(against, search=no_search)


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return checked(tmp_path_factory.mktemp("guide"), a100s(), guide_md=GUIDE)


def plans(found: Checked) -> tuple[Plan, Plan | None]:
    (prediction,) = found.predictions
    assert prediction.plan is not None
    return prediction.plan, prediction.best


def rule(found: Checked, name: str) -> Finding:
    (finding,) = [one for one in found.findings if one.rule == name]
    return finding


# Qwen3-30B-A3B, ZeRO-2, five cards ------------------------------------------------------------


def test_the_guide_does_not_fit_by_its_states_alone(guide: Checked) -> None:
    plan, best = plans(guide)

    assert plan.id == "zero2-dp5-mbs2-full"
    parts = plan.memory.by_stage[0].parts_bytes
    # ZeRO-2: full 16-bit weights, a fifth of the 16-bit gradients and of 12 bytes of optimizer states.
    assert parts["weights"] == pytest.approx(2 * P30, rel=1e-3)
    assert parts["gradients"] == pytest.approx(2 * P30 / 5, rel=1e-3)
    assert parts["optimizer"] == pytest.approx(12 * P30 / 5, rel=1e-3)
    assert best is None
    finding = rule(guide, "plan-does-not-fit")
    assert finding.severity == "error"
    assert "56.9 GiB weights, 11.4 GiB gradients, 68.2 GiB optimizer" in finding.why


def test_what_would_fit_of_the_guide_is_said(guide: Checked) -> None:
    (prediction,) = guide.predictions
    host, adapters, more = prediction.fixes

    # Stage 3 would gather each of the 18,432 linear layers of the experts separately.
    assert (host.plan.layout.zero_stage, host.plan.layout.offload_optimizer) == (2, True)
    assert 15.9 * P30 / GIB < host.plan.memory.host_bytes / GIB < 20.1 * P30 / GIB
    assert "LoRA" in adapters.change
    assert (more.plan.layout.zero_stage, more.plan.layout.dp) == (3, 8)
    # 16 bytes per parameter over 8 cards are 56.9 GiB.
    assert 16 * P30 / 8 < more.plan.memory.device_bytes < more.plan.memory.capacity_bytes
    remedy = rule(guide, "plan-does-not-fit").remedy
    assert all(one.plan.id in remedy for one in prediction.fixes)


def test_with_host_memory_the_same_five_cards_do_it(tmp_path: Path) -> None:
    found = checked(tmp_path, a100s(host_memory="1TiB"), guide_md=GUIDE)

    finding = rule(found, "plan-does-not-fit")
    assert "set deepspeed: zero2_offload" in finding.remedy
    assert found.predictions[0].fixes == ()


def test_the_guide_is_corrected_and_predicted_again(guide: Checked) -> None:
    fixed = fix(guide, a100s())

    assert fixed.after.predictions[0].plan is not None
    assert "plan-does-not-fit" in [one.rule for one in fixed.after.findings]


# Qwen3-8B, a DeepSpeed file alone ------------------------------------------------------------


def test_the_notes_file_fits_with_much_to_spare_and_needs_no_offload(tmp_path: Path) -> None:
    found = checked(tmp_path, a100s(host_memory="512GB"), note_md=NOTE)
    plan, best = plans(found)

    assert plan.id == "zero3-dp8-mbs4-full-offload"
    assert plan.fits
    assert plan.memory.device_bytes < 40 * GIB  # "each card needs at least 80 GB"
    # Optimizer states, 16-bit and fp32 gradients: 18 bytes per parameter, as its share is about one sub-group of 1e9.
    assert plan.memory.host_bytes == pytest.approx(18 * P8, rel=0.02)
    # Two forward passes and one backward: 8 operations per parameter and token, at most at the card's 312 TFLOP/s.
    assert 8 * P8 * 256 * 2048 / 8 / 312e12 < plan.time.step_s < 60
    assert best.memory.host_bytes == 0
    (prediction,) = found.predictions
    assert prediction.best_of_backend.layout.zero_stage < 3  # "needs ZeRO-3"
    assert not prediction.best_of_backend.layout.offload_optimizer
    assert rule(found, "plan-slower").severity == "warning"
    assert "the model is Qwen/Qwen3-8B, the only one that the text names" in prediction.translation.assumptions  # type: ignore[union-attr]


def test_the_notes_file_is_refused_on_the_four_cards_that_it_recommends(tmp_path: Path) -> None:
    four = PredictionTarget(
        cluster=load_cluster("cluster_specs/h100-4x8.yaml", overrides=("nodes=1", "gpus_per_node=4"))
    )
    finding = rule(checked(tmp_path, unsearched(four), note_md=NOTE), "deepspeed-batch-of-gpus")

    assert finding.severity == "error"
    assert "hold for 8 GPUs, and h100-4x8 has 4" in finding.what


# Qwen2-72B, everything offloaded ------------------------------------------------------------


@pytest.mark.parametrize(("host_memory", "fits"), [("800GB", False), ("2TB", True)])
def test_800_gb_do_not_hold_the_72b_recipe(tmp_path: Path, host_memory: str, fits: bool) -> None:
    zero = json.dumps({"zero_optimization": ZERO3})
    found = checked(tmp_path, unsearched(a100s(host_memory=host_memory)), train_yaml=RECIPE, ds_json=zero)
    plan, _ = plans(found)

    assert plan.layout.offload_param
    assert plan.fits is fits
    # The cards hold it either way: gathered weights, activations of 4 x 2560 tokens, and no states.
    assert plan.memory.excess_bytes < 0
    assert (found.count("error") == 0) is fits
    if not fits:
        assert rule(found, "layout-host-memory").severity == "error"
        assert 16 * P72 < plan.memory.host_bytes < 20.1 * P72


# Refusals ------------------------------------------------------------


def test_8_bit_weights_under_zero_3_are_told_once(tmp_path: Path) -> None:
    text = RECIPE.replace("finetuning_type: full", "finetuning_type: lora\nquantization_bit: 8")
    zero = json.dumps({"zero_optimization": {"stage": 3}})
    found = checked(tmp_path, unsearched(a100s()), train_yaml=text, ds_json=zero)

    assert [one.rule for one in found.findings if one.severity == "error"] == ["llamafactory-refused-together"]
    assert found.predictions[0].reason.startswith("the layout breaks rule quantised")


def test_ulysses_that_does_not_divide_the_heads_is_told(tmp_path: Path) -> None:
    command = "NPROC_PER_NODE=6 swift sft --model Qwen/Qwen3-8B --tuner_type full --dataset a --max_length 8192"
    script = f"{command} --sequence_parallel_size 3 --deepspeed zero3\n"
    finding = rule(checked(tmp_path, unsearched(a100s()), run_sh=script), "layout-ulysses")

    assert (finding.severity, finding.what) == ("error", "32 heads % ulysses 3 = 2")


def test_what_is_not_predicted_is_one_finding_without_a_number(tmp_path: Path) -> None:
    text = RECIPE.replace("deepspeed: ds.json\n", "use_galore: true\n")
    found = checked(tmp_path, a100s(), train_yaml=text)

    finding = rule(found, "not-predicted")
    assert (finding.severity, finding.line) == ("note", 5)
    assert (finding.what, finding.remedy) == ("use_galore true is not predicted", "predicted is use_galore false")
    (prediction,) = found.predictions
    assert (prediction.plan, prediction.best) == (None, None)
