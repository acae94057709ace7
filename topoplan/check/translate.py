"""From a configuration of a Megatron trainer to the job and the layout that it would really run.

Defaults are the trainers' own: LLaMA-Factory's Megatron path from the key list of `catalog/trainer_keys`, ms-swift's
`megatron sft` from its `megatron/arguments/megatron_args.py`. What a trainer does with a key beyond taking it is said
where it is done, with its place in the trainer's source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from topoplan.check.model_named import named_model
from topoplan.check.processes import Processes, processes_for
from topoplan.check.setup import Configuration, Setup, Trainer
from topoplan.check.typed_keys import Keys
from topoplan.emit.trainer_keys import known_keys
from topoplan.emit.trainer_yaml import FREEZABLE_MODEL_TYPES
from topoplan.errors import LayoutError, SpecError
from topoplan.layout.forms import recompute_from_value
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.rules import facts_of
from topoplan.layout.stages import spread_pipeline_layout, vpp_of
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec
from topoplan.units import shown

MODEL_KEYS: Mapping[Trainer, str] = {
    "llamafactory": "model_name_or_path",
    "swift": "model",
    "swift-megatron": "model",
}
"""Where a trainer has the model; a configuration without it is a piece of one."""

_SWIFT_DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "recompute_granularity": "selective",
    "recompute_modules": "core_attn",
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "native",
    "optimizer_offload_fraction": 1.0,
    "use_distributed_optimizer": True,
    "main_grads_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "freeze_vit": True,
    "freeze_aligner": True,
    "torch_dtype": "bfloat16",
    "num_train_epochs": 1,
}
"""`MegatronArguments` and `MegatronTunerMixin` of ms-swift. A model's torch_dtype is its checkpoint's; nearly all have
bfloat16."""

_STAGES = ("pt", "sft", "dpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A configuration in the terms of the planner."""

    configuration: Configuration
    spec: Spec
    """Cluster, model and job; what a search for a better layout has to keep is pinned."""
    layout: Layout
    """As the trainer would run it, legal or not."""
    processes: Processes | None
    """What its command starts; None where none was found."""
    assumptions: tuple[str, ...]
    """Sentences on what the files do not say."""


def is_whole(configuration: Configuration) -> bool:
    """It names a model: what does not is a piece of a configuration, as articles show them."""
    key = MODEL_KEYS.get(configuration.trainer)
    return key is not None and isinstance(configuration.get(key), str)


def model_of(
    configuration: Configuration, given: str | None, default_positions: int | None = None
) -> tuple[Model, str]:
    """The model of a whole configuration, or the one that is given in its place. Raises ModelError."""
    reference = given or str(configuration.get(MODEL_KEYS[configuration.trainer]))
    return named_model(reference, base=Path(configuration.part.name).parent, default_positions=default_positions)


def translate(
    configuration: Configuration,
    setup: Setup,
    cluster: Cluster,
    *,
    model: str | None = None,
    profile: OwnProfile | None = None,
) -> Translation:
    """The job and the layout of a configuration on a cluster.

    `model` takes the place of the one that the configuration names. Raises InputError where it cannot be predicted:
    the message says why.
    """
    is_mca = setup.uses_mca(configuration)
    if not is_mca and configuration.trainer != "swift-megatron":
        raise SpecError("only Megatron trainers are predicted so far", where=configuration.part.place(None))
    keys = Keys(configuration, _mca_defaults() if is_mca else _SWIFT_DEFAULTS)
    length_key = "cutoff_len" if is_mca else "max_length"
    seq_len = keys.count(length_key)
    if seq_len is None:
        keys.fail(length_key, f"{length_key} is not given, and the model's own is no length of samples")
    built, assumption = model_of(configuration, model, seq_len)
    processes = processes_for(setup, configuration)
    part, on_part = _part_of(cluster, processes)
    layout = (_mca_layout if is_mca else _swift_layout)(keys, built, part.world_size)
    job = _mca_job(keys, built, layout, seq_len) if is_mca else _swift_job(keys, built, seq_len, processes)
    spec = Spec(cluster=part, model=built, job=job, profile=profile, path=configuration.part.place(None))
    assumptions = [assumption, on_part]
    if not job.packs:
        assumptions.append(f"every sequence is taken to be {length_key} long, {seq_len:,} tokens")
    if is_mca and keys.value("finetuning_type") != "full":
        assumptions.append(f"finetuning_type {keys.value('finetuning_type')} trains all weights in this trainer")
    if layout.ep > 1 and (dispatcher := keys.value("moe_token_dispatcher_type")) not in ("alltoall", "flex"):
        assumptions.append(f"the {dispatcher} dispatcher is predicted as alltoall, which sends less")
    return Translation(
        configuration=configuration,
        spec=spec,
        layout=layout,
        processes=processes,
        assumptions=tuple(filter(None, assumptions)),
    )


def _part_of(cluster: Cluster, processes: Processes | None) -> tuple[Cluster, str]:
    """The machines and GPUs of a cluster that a command uses, and a sentence on them; all where it asks for more."""
    if processes is None:
        return cluster, ""
    nodes, gpus = processes.nodes or cluster.nodes, processes.gpus_per_node or cluster.gpus_per_node
    if (nodes, gpus) == (cluster.nodes, cluster.gpus_per_node):
        return cluster, ""
    if nodes > cluster.nodes or gpus > cluster.gpus_per_node:
        return cluster, f"predicted on the cluster's {cluster.nodes} x {cluster.gpus_per_node} GPUs"
    part = replace(
        cluster,
        nodes=nodes,
        gpus_per_node=gpus,
        nvlink_domain_gpus=min(cluster.nvlink_domain_gpus, nodes * gpus),
        hosts=cluster.hosts[:nodes],
    )
    return part, f"predicted on the {nodes} x {gpus} GPUs that the command uses"


# LLaMA-Factory on mcore_adapter --------------------------------------------------------------------------------------


def _mca_defaults() -> Mapping[str, Any]:
    return {name: key.default for name, key in known_keys().items()}


def _mca_layout(keys: Keys, model: Model, world: int) -> Layout:
    values = _shared_values(keys, model)
    tp, ep = values["tp"], values["ep"]
    is_moe = facts_of(model).is_moe
    fp8 = keys.value("fp8") is not None
    return _layout(
        "mca",
        values,
        world=world,
        micro_batch_size=keys.degree("per_device_train_batch_size"),
        gradient_accumulation_steps=keys.degree("gradient_accumulation_steps"),
        etp=(keys.count("expert_tensor_parallel_size") or tp) if is_moe else 1,
        # models/model_config.py::McaModelConfig.__post_init__
        sequence_parallel=tp > 1 and (keys.flag("sequence_parallel") or ep > 1),
        # training_args.py: bf16 switches it on
        grad_reduce_in_fp32=keys.flag("bf16") or keys.flag("accumulate_allreduce_grads_in_fp32"),
        cross_entropy_fusion=keys.flag("cross_entropy_loss_fusion") and tp == 1,  # its help: only with TP 1
        fp8_param=fp8 and keys.flag("fp8_param"),
    )


def _mca_job(keys: Keys, model: Model, layout: Layout, seq_len: int) -> Job:
    stage = keys.text("stage") or "sft"
    if stage not in _STAGES:
        keys.fail(
            "stage", f"stage {shown(stage)} does not reach the Megatron trainer", expected="expected pt, sft or dpo"
        )
    if keys.text("optimizer") != "adam":
        keys.fail("optimizer", f"optimizer {keys.text('optimizer')} is not predicted", expected="expected adam")
    packing = keys.given("packing")
    apart = stage == "sft" and (keys.flag("neat_packing") or keys.flag("sequence_packing"))
    # train/mca/workflow.py::_freeze_model_parameters; run_pt does not call it.
    freezes = stage != "pt" and model.vision is not None and model.model_type in FREEZABLE_MODEL_TYPES
    job = Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        precision=_mca_precision(keys),
        stage=stage,
        packing=apart or (stage == "pt" if packing is None else bool(packing)),
        freeze_vision_tower=freezes and keys.flag("freeze_vision_tower"),
        freeze_multi_modal_projector=freezes and keys.flag("freeze_multi_modal_projector"),
        freeze_language_model=freezes and keys.flag("freeze_language_model"),
        image_max_pixels=keys.degree("image_max_pixels"),
        mtp_num_layers=keys.value("mtp_num_layers") and keys.degree("mtp_num_layers"),
        trainer={"neat_packing": True} if apart else {},
        pin={"cp": 1} if apart else {},  # its sub-sequences are no multiples of 2 * cp (emit/user_keys.py)
    )
    _check_something_trained(keys, "freeze_language_model", job)
    return replace(job, samples=None if job.packs else _most_samples(keys))


def _mca_precision(keys: Keys) -> str:
    if keys.flag("fp16"):
        return "fp16"
    if not keys.flag("bf16"):
        keys.fail("bf16", "neither bf16 nor fp16 is on: the trainer then keeps weights in fp32, which is not predicted")
    if keys.value("fp8") is None:
        return "bf16"
    return "mxfp8" if keys.value("fp8_recipe") == "mxfp8" else "fp8"


def _most_samples(keys: Keys) -> int | None:
    """Samples of an epoch at most: LLaMA-Factory takes `max_samples` of every data set."""
    limit, names = keys.count("max_samples"), keys.value("dataset")
    if limit is None or not isinstance(names, str) or keys.flag("streaming"):
        return None
    return limit * len([name for name in names.split(",") if name.strip()]) or None


# ms-swift's megatron sft ---------------------------------------------------------------------------------------------


def _swift_layout(keys: Keys, model: Model, world: int) -> Layout:
    values = _shared_values(keys, model)
    for key in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "use_megatron_fsdp"):
        if keys.given(key):
            keys.fail(key, f"{key} is not predicted")
    is_moe, tp = facts_of(model).is_moe, values["tp"]
    dp = max(1, world // (tp * values["pp"] * values["cp"]))
    micro_batch = keys.degree("micro_batch_size")
    dispatcher = keys.text("moe_token_dispatcher_type")
    return _layout(
        "megatron",
        values,
        world=world,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=max(1, keys.degree("global_batch_size") // (micro_batch * dp)),
        etp=keys.degree("expert_tensor_parallel_size") if is_moe else 1,
        sequence_parallel=tp > 1 and keys.flag("sequence_parallel"),
        # megatron_args.py::MegatronArguments._map_dtype
        grad_reduce_in_fp32=keys.value("main_grads_dtype") == "fp32" or keys.flag("accumulate_allreduce_grads_in_fp32"),
        cross_entropy_fusion=keys.flag("cross_entropy_loss_fusion"),
        cross_entropy_fusion_impl=str(keys.value("cross_entropy_fusion_impl")),
        precision_aware_optimizer=keys.flag("use_precision_aware_optimizer"),
        fp8_param=keys.value("fp8_format") is not None and keys.flag("fp8_param_gather"),
        moe_token_dispatcher_type=("flex" if dispatcher == "flex" else "alltoall") if is_moe else None,
    )


def _swift_job(keys: Keys, model: Model, seq_len: int, processes: Processes | None) -> Job:
    for key in ("train_type", "tuner_type"):
        if (kind := keys.given(key)) not in (None, "full"):
            keys.fail(key, f"{key} {shown(kind)} is not predicted yet", expected="expected full")
    launch = processes.launch if processes else None
    words = [launch.program.rpartition(".")[2], *launch.arguments[:1]] if launch else []
    stage = next((word for word in words if word in ("pt", "sft", "rlhf")), "sft")
    if stage == "rlhf":
        if keys.given("rlhf_type") != "dpo":
            keys.fail("rlhf_type", f"rlhf_type {shown(keys.given('rlhf_type'))} is not predicted")
        stage = "dpo"
    dtype = "float16" if keys.flag("fp16") else keys.value("torch_dtype")
    if dtype not in ("bfloat16", "float16"):
        keys.fail("torch_dtype", f"torch_dtype {shown(dtype)} is not predicted")
    precision = "fp16" if dtype == "float16" else "bf16"
    if keys.value("fp8_format") is not None:
        precision = "mxfp8" if keys.value("fp8_recipe") == "mxfp8" else "fp8"
    sees = model.vision is not None
    job = Job(
        seq_len=seq_len,
        global_batch_size=keys.degree("global_batch_size"),
        precision=precision,
        stage=stage,
        packing=keys.flag("packing"),
        freeze_vision_tower=sees and keys.flag("freeze_vit"),
        freeze_multi_modal_projector=sees and keys.flag("freeze_aligner"),
        freeze_language_model=sees and keys.flag("freeze_llm"),
        pin={
            "backend": "megatron",
            **({"moe_token_dispatcher_type": "alltoall"} if facts_of(model).is_moe else {}),
            "cross_entropy_fusion": keys.flag("cross_entropy_loss_fusion"),
            "cross_entropy_fusion_impl": str(keys.value("cross_entropy_fusion_impl")),
        },
    )
    _check_something_trained(keys, "freeze_llm", job)
    return job


# Both ----------------------------------------------------------------------------------------------------------------


def _shared_values(keys: Keys, model: Model) -> dict[str, Any]:
    """Layout values of the keys that both have under one name."""
    pp = keys.degree("pipeline_model_parallel_size")
    vpp = keys.degree("virtual_pipeline_model_parallel_size")
    text = keys.text("pipeline_model_parallel_layout")
    if text is not None:
        try:
            vpp = vpp_of(text, pp)
        except LayoutError as error:
            keys.fail("pipeline_model_parallel_layout", str(error))
    elif keys.flag(_EMBEDDING) or keys.flag(_LOSS):
        text = _accounted_layout(keys, model.num_layers, pp, vpp)
    return {
        "tp": keys.degree("tensor_model_parallel_size"),
        "pp": pp,
        "vpp": vpp,
        "cp": keys.degree("context_parallel_size"),
        "ep": keys.degree("expert_model_parallel_size"),
        "pipeline_layout": text,
        "recompute": _recompute(keys),
        "distributed_optimizer": keys.flag("use_distributed_optimizer"),
        "overlap_grad_reduce": keys.flag("overlap_grad_reduce"),
        "overlap_param_gather": keys.flag("overlap_param_gather"),
        "optimizer_offload_fraction": (
            keys.fraction("optimizer_offload_fraction") if keys.flag("optimizer_cpu_offload") else 0.0
        ),
    }


_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def _accounted_layout(keys: Keys, layers: int, pp: int, vpp: int) -> str | None:
    """The split in which embedding or loss count as a layer (MLM `transformer_block.py::get_num_layers_to_build`)."""
    first, last, count = int(keys.flag(_EMBEDDING)), int(keys.flag(_LOSS)), pp * vpp
    total = layers + first + last
    if count == 1:
        return None
    if total % count:
        equation = f"({layers} layers + {first + last}) % (pp {pp} * vpp {vpp}) = {total % count}"
        keys.fail(_EMBEDDING if first else _LOSS, equation, expected="expected stages of equal length")
    return spread_pipeline_layout(layers, pp, vpp, total // count - first, total // count - last)


def _recompute(keys: Keys) -> Recompute:
    granularity = keys.value("recompute_granularity")
    in_moe = keys.flag("moe_layer_recompute")
    modules = keys.value("recompute_modules")
    if granularity in (None, "none") and not in_moe:
        return Recompute()
    if in_moe and granularity != "full":
        # MLM transformer_config.py: the old name of selective recomputation of `moe`
        names = modules if isinstance(modules, list) else str(modules or "core_attn").split(",")
        modules, granularity = [*(names if granularity == "selective" else ()), "moe"], "selective"
    form = {"granularity": granularity}
    if granularity == "selective":
        form["modules"] = modules.split() if isinstance(modules, str) and "," not in modules else modules
    elif granularity == "full":
        form["method"] = keys.value("recompute_method")
        form["num_layers"] = keys.count("recompute_num_layers")
    try:
        return recompute_from_value(form, "recompute_granularity")
    except LayoutError as error:
        keys.fail("recompute_granularity", error.what, expected=error.expected)


def _layout(backend: str, values: Mapping[str, Any], *, world: int, **others: Any) -> Layout:
    dp = max(1, world // (values["tp"] * values["pp"] * values["cp"]))
    return Layout(backend=backend, dp=dp, **values, **others)


def _check_something_trained(keys: Keys, key: str, job: Job) -> None:
    if job.freeze_language_model and job.freeze_vision_tower and job.freeze_multi_modal_projector:
        keys.fail(key, "everything is frozen, so nothing would be trained")


# And back ------------------------------------------------------------------------------------------------------------


def trainer_keys(layout: Layout, *, is_moe: bool) -> dict[str, Any]:
    """The keys of a layout in its trainer's words; None where the key is best left out.

    For `mca` LLaMA-Factory's, for `megatron` those of ms-swift.
    """
    recompute, is_mca = layout.recompute, layout.backend == "mca"
    full, selective = recompute.granularity == "full", recompute.granularity == "selective"
    batch = (
        {
            "per_device_train_batch_size": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        }
        if is_mca
        else {"micro_batch_size": layout.micro_batch_size}
    )
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep if is_moe else None,
        "expert_tensor_parallel_size": layout.etp if is_moe else None,
        "sequence_parallel": layout.sequence_parallel,
        **batch,
        "recompute_granularity": recompute.granularity if full or selective else None if is_mca else "none",
        "recompute_method": recompute.method if full else None,
        "recompute_num_layers": recompute.num_layers if full else None,
        "recompute_modules": ",".join(recompute.modules) if selective else None,
        "use_distributed_optimizer": layout.distributed_optimizer,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.overlap_param_gather,
        "optimizer_cpu_offload": layout.optimizer_offload_fraction > 0,
        "optimizer_offload_fraction": layout.optimizer_offload_fraction or None,
    }
