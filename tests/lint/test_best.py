"""The best plan among a trainer's backends, and what would make a job fit."""

from dataclasses import replace

from tests.reading.setups import all_of, configuration, mca, swift_zero2
from topoplan.lint.best import any_samples, backends_of, best_of, sentence, ways_to_fit
from topoplan.lint.translate import Translation, translate
from topoplan.planner.plan import Ranking
from topoplan.planner.predict import memory_of
from topoplan.planner.search import rank
from topoplan.specs.cluster import Cluster
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of


def zero(cluster: Cluster, **keys: object) -> Translation:
    lines = {"model_name_or_path": "Qwen/Qwen3-8B", "finetuning_type": "full", "bf16": "true"} | keys
    one = configuration("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return translate(one, all_of(one), cluster)


def guide(cluster: Cluster) -> Translation:
    one, where = swift_zero2(max_length=4096, per_device_train_batch_size=2, gradient_accumulation_steps=8)
    return translate(one, where, cluster)


def test_each_trainer_has_its_own_megatron_and_the_files_backend_comes_first(a100s: Cluster) -> None:
    one = mca()
    assert backends_of(translate(one, all_of(one), a100s)) == ("mca", "ddp", "deepspeed", "fsdp2")
    assert backends_of(zero(a100s, deepspeed="ds_z3_config.json")) == ("deepspeed", "mca", "ddp", "fsdp2")
    assert backends_of(guide(a100s)) == ("deepspeed", "megatron", "ddp", "fsdp2")


def test_the_best_plan_is_of_all_backends_and_the_own_one_of_the_files(a100s: Cluster) -> None:
    found = best_of(zero(a100s, deepspeed="ds_z3_config.json", per_device_train_batch_size=1), rank)

    assert found.own.layout.backend == "deepspeed"
    assert found.plan.tokens_per_s_per_gpu >= found.own.tokens_per_s_per_gpu
    assert found.plan.layout.backend == "mca"


def test_a_search_keeps_what_the_trainer_cannot_change(a100s: Cluster) -> None:
    asked: list[Spec] = []

    def search(spec: Spec) -> Ranking:
        asked.append(spec)
        return rank(spec)

    best_of(zero(a100s, enable_liger_kernel="true"), search)
    pins = {spec.job.pin["backend"]: spec.job.pin for spec in asked}
    assert pins["mca"] == {"backend": "mca"}
    for backend in ("ddp", "deepspeed", "fsdp2"):
        assert pins[backend]["fused_linear_cross_entropy"] is True
        assert pins[backend]["ulysses"] == 1  # LLaMA-Factory does not split sequences
    asked.clear()
    best_of(guide(a100s), search)
    assert "ulysses" not in asked[0].job.pin


def test_a_plan_that_the_trainer_refuses_is_not_the_best(a100s: Cluster) -> None:
    """bitsandbytes' optimizer does not support FSDP2's shards."""
    lora = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "finetuning_type": "lora", "cutoff_len": 8192}
    lora |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    usual, in_8_bits = (
        best_of(zero(a100s, **lora, optim=name), rank, backends=("fsdp2",)) for name in ("adamw_torch", "adamw_8bit")
    )

    assert usual.plan is not None
    assert in_8_bits.plan is None
    other = best_of(zero(a100s, **lora, optim="adamw_8bit"), rank).plan
    assert other.layout.backend != "fsdp2"


def test_what_offloads_is_compared_with_its_like_where_no_host_memory_is_stated(a100s: Cluster) -> None:
    model = {"model_name_or_path": "Qwen/Qwen2-72B", "deepspeed": "ds_z3_offload_config.json"}
    found = best_of(zero(a100s, **model, per_device_train_batch_size=1), rank)

    assert found.own.layout.offload_optimizer
    assert found.own.memory.host_capacity_bytes is None


def test_ways_to_fit_hold(a100s: Cluster) -> None:
    translation = guide(a100s)
    host, adapters, more = ways_to_fit(translation, a100s, rank)

    assert host.plan.layout.offload_optimizer
    enough = replace(translation.spec.cluster, host_memory_bytes=int(host.plan.memory.host_bytes) + 1)
    with_host = replace(translation.spec, cluster=enough)
    assert memory_of(case_of(with_host, host.plan.layout.backend), host.plan.layout).fits
    assert adapters.change == "with LoRA of rank 8"
    assert adapters.plan.fits
    assert more.change == "on 8 of these GPUs (1 x 8)"
    assert more.plan.layout.zero_stage == 3
    # 6 and 7 GPUs are too few: 16 bytes per parameter are 75.8 and 65.0 GiB, plus one micro-batch.
    for gpus in (6, 7):
        fewer = replace(translation.spec.cluster, gpus_per_node=gpus, nvlink_domain_gpus=gpus)
        spec = replace(translation.spec, cluster=fewer, job=replace(translation.spec.job, global_batch_size=16 * gpus))
        assert best_of(translation, rank, spec).plan is None
    words = sentence((host, adapters, more))
    assert words.startswith("it would fit with ")
    assert "zero3-dp8-mbs1-full" in words
    assert sentence(()) == ""


def test_samples_bind_no_layout(a100s: Cluster) -> None:
    spec = zero(a100s).spec
    assert any_samples(replace(spec, job=replace(spec.job, samples=3))) == spec
