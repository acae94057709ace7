"""ms-swift: `swift sft` for DDP, DeepSpeed and FSDP2, `megatron sft` for Megatron layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from topoplan.engines.megatron.states import stage_parameters
from topoplan.layout.layout import Layout
from topoplan.operators.adapters import Adapters, adapters_of
from topoplan.operators.layers import mtp_layer
from topoplan.operators.params import adapter_tensors, parameter_count
from topoplan.specs.case import case_with
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize, plain_checkpoint_size
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.loading import loading_caveats
from topoplan.trainers.log import FIGURE, Log, loss_key, tqdm_bar, value_of
from topoplan.trainers.requirements import Versions, install_commands, requirements_of
from topoplan.trainers.sharding_files import DEEPSPEED_FILE
from topoplan.trainers.steps import pauses_of, steps
from topoplan.trainers.swift import megatron_job, sft_job
from topoplan.trainers.swift.arguments import swift_versions
from topoplan.trainers.swift.common import BRIDGE, READ_AT
from topoplan.trainers.swift.counterparts import in_terms_of
from topoplan.trainers.swift.megatron import TRAITS, megatron_files
from topoplan.trainers.swift.reading import MEGATRON, SWIFT
from topoplan.trainers.swift.refusals import megatron_job_refusals, megatron_refusals, sharded_refusals
from topoplan.trainers.swift.samples import MEGATRON_TRIAL, TRIAL, files_in, samples_argument
from topoplan.trainers.swift.sft import FSDP_FILE, sft_files
from topoplan.trainers.templating import render
from topoplan.trainers.trainer import (
    DATASET_TO_FILL_IN,
    Checkpoints,
    ReadmeWords,
    Trainer,
    TrainerRun,
    TrainingPath,
    torchrun_command,
)
from topoplan.trainers.traits import MCA, PACKED_APART

_ALLOCATOR = EnvVar("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "less fragmentation, as predicted")
_PROGRESS = """\
From then on every step prints a line with `loss`, `grad_norm` and
`memory(GiB)`, and `logging.jsonl` in `output_dir` has them too, with the time that is left."""
_RESUME = """\
start the same again. The script names the last whole checkpoint in `output_dir` to ms-swift, which
  takes up weights, optimizer and scheduler and skips the samples that it has seen."""
_DATA = """\
Each line of a `.jsonl` is a sample:
   `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`"""
_DATA_PT = """\
Each line of a `.jsonl` is a sample: `{"messages": [{"role": "assistant", "content": "..."}]}`"""
_DATA_IMAGES = """, with
   `"images": ["path"]` beside `messages` and `<image>` in its text, once an image"""
_DATA_ON_NODES = """
   Each node tokenises them for itself, into `MODELSCOPE_CACHE`; where `env` in the spec makes that a directory which
   all nodes share, it is done once."""
_VISION = {"qwen_vl_utils": ">=0.0.14", "decord": "", "torchvision": ""}
"""What `requires` lists for the Qwen-VL models (swift/model/models/qwen.py), and what they decode images with."""
_MEGATRON_CORE = "0.16.1", "0.19.2"
"""The versions of megatron-core that files were tested with, the usual one first."""
_VERSIONS = Versions(
    title="ms-swift",
    # mcore-bridge 1.6.5, its requirement in the wheel
    bounds={"megatron-core": (">=0.16,<0.20", f"mcore-bridge {BRIDGE} supports megatron-core 0.16 to 0.19")},
    tried=lambda: {"megatron-core": _MEGATRON_CORE},
)
_FLASH = "==2.8.3"
"""The newest version that Transformer Engine supports (docs/source_en/Megatron-SWIFT/Quick-start.md)."""


def _run(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> TrainerRun:
    job, backend = spec.job, layout.backend
    engine = {"ddp": "", "deepspeed": f" with DeepSpeed ZeRO-{layout.zero_stage}", "fsdp2": " with FSDP2"}[backend]
    files = {
        "ddp": (),
        "deepspeed": ((DEEPSPEED_FILE, "what DeepSpeed reads; `auto` is filled in from `train.yaml`"),),
        "fsdp2": ((FSDP_FILE, "how FSDP2 shards"),),
    }[backend]
    wanted = {
        "accelerate": ">=1.15" if backend == "fsdp2" else None,
        "transformers": ">=5" if layout.experts_impl == "grouped_mm" else None,
        "deepspeed": "" if backend == "deepspeed" else None,
        "bitsandbytes": "" if job.finetuning == "qlora" or job.optimizer == "adamw_8bit" else None,
        "flash-attn": _FLASH if values.get("attn_impl") in ("flash_attn", "flash_attention_2") else None,
        "liger-kernel": "" if values.get("use_liger_kernel") else None,
    }
    return _trainer_run(
        spec,
        layout,
        values,
        engine=f"ms-swift{engine}",
        files=files,
        wanted={name: versions for name, versions in wanted.items() if versions is not None},
        environment=(_ALLOCATOR,) if layout.expandable_segments else (),
        checkpoint=plain_checkpoint_size(spec, layout, values)._replace(saves_at_end=False),
        steps=steps(job, values),
    )


def _run_megatron(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> TrainerRun:
    return _trainer_run(
        spec,
        layout,
        values,
        engine="ms-swift on Megatron-core (mcore_bridge)",
        wanted={"mcore-bridge": f"=={BRIDGE}", "megatron-core": f"=={_MEGATRON_CORE[0]}", "transformer-engine": ""},
        also={"flash-attn": _FLASH},
        environment=(_ALLOCATOR,),
        checkpoint=_megatron_checkpoint(spec, values),
        checkpoints=Checkpoints(whole="latest_checkpointed_iteration.txt"),
        steps=_megatron_steps(spec.job, values),
    )


def _trainer_run(
    spec: Spec,
    layout: Layout,
    values: Mapping[str, Any],
    *,
    engine: str,
    wanted: Mapping[str, str],
    files: tuple[tuple[str, str], ...] = (),
    also: Mapping[str, str] = MappingProxyType({}),
    steps: int | None,
    **further: Any,
) -> TrainerRun:
    """Return what both commands need: `wanted` beside ms-swift itself, `also` without being required."""
    usual = {"torch": "", "ms-swift": f"=={READ_AT}", "pyyaml": ""}
    requirements = requirements_of(spec, layout, _VERSIONS, {**usual, **wanted})
    also = {**({} if spec.model.vision is None else _VISION), **also}
    samples = values.get("dataset")
    names = [samples] if isinstance(samples, str) else list(samples or [])
    data = _DATA_PT if spec.job.stage == "pt" else _DATA
    data += (_DATA_IMAGES if spec.model.vision is not None else "") + ". They are shuffled in every epoch."
    return TrainerRun(
        model_dir=str(values["model"]),
        output_dir=str(values["output_dir"]),
        dataset=", ".join(map(str, names)) or DATASET_TO_FILL_IN,
        dataset_files=files_in(samples),
        to_fill_in="dataset",
        requirements=requirements,
        steps=steps,
        pauses=pauses_of(values, spec.job, steps),
        readme=ReadmeWords(
            engine=engine,
            packages="ms-swift and what it runs on",
            install=install_commands(requirements, brought=("pyyaml",), also=also),
            data_note=data + (_DATA_ON_NODES if spec.cluster.nodes > 1 else ""),
            dataset_words="to a file of samples (`.jsonl`) or to a hub id",
            progress=_PROGRESS,
            resume=_RESUME,
            files=files,
        ),
        **further,
    )


# Checkpoints ---------------------------------------------------------------------------------------------------------


def _megatron_checkpoint(spec: Spec, values: Mapping[str, Any]) -> CheckpointSize:
    """Return Megatron's checkpoint sizes: weights in both formats, and optimizer states once, in fp32
    (trainers/base.py).

    With LoRA, the weights are the adapters; with merge_lora, the Hugging Face weights are the whole merged model.
    """
    # Adapters are on the linear layers of Megatron's model, including experts.
    parameters = stage_parameters(case_with(spec, MCA), Layout(), 0)
    total, trained = parameter_count(spec.model), parameters.dense + parameters.expert
    to_hf, weights_alone = bool(values.get("save_safetensors", True)), bool(values.get("no_save_optim"))
    limit, adapters = values.get("save_total_limit"), adapters_of(spec.job)
    merges = bool(values.get("merge_lora", to_hf))
    for_hf = total if adapters is None or merges else _peft_elements(spec, adapters)
    return CheckpointSize(
        what="adapters" if adapters else "weights",
        megatron_bytes=0 if to_hf and weights_alone else 2 * (trained if adapters else total),
        hf_bytes=2 * for_hf if to_hf else 0,
        optimizer_bytes=0 if weights_alone else 12 * trained,
        saves_at_end=False,
        at_once=None if limit is None else max(2, int(limit)) + 1,
    )


def _peft_elements(spec: Spec, adapters: Adapters) -> int:
    """Return the elements of the adapters in PEFT's format, where projections that share an A have a copy each.

    These are q, k and v, and gate and up. Source: mcore_bridge `bridge/gpt_bridge.py` (lora_A.clone()).
    """
    total = 0
    layers = (*spec.model.layers, *(spec.job.mtp_num_layers * (mtp_layer(spec.model),)))
    for layer in layers:
        for tensor in adapter_tensors(spec.model, layer, adapters):
            copies = 3 if tensor.name == "linear_qkv.lora_A" else 1
            if tensor.name.endswith("linear_fc1.lora_A") and layer.ffn.gated:
                copies = 2
            total += copies * tensor.elements
    return total


# The end of a node's script ------------------------------------------------------------------------------------------

# `swift sft FILE.yaml` (swift/cli/main.py) converts a YAML file's keys to arguments. It then starts torchrun if
# NPROC_PER_NODE or NNODES is set, or else one more Python process per rank. `torchrun --no_python swift sft` therefore
# starts every rank twice, or a torchrun in each rank if one of the two is set. Neither forwards signals nor reports how
# a rank ended. The modules that it starts (ROUTE_MAPPING) accept arguments only, no YAML.

_FILES = {"deepspeed": ("deepspeed", DEEPSPEED_FILE), "fsdp2": ("fsdp", FSDP_FILE)}
"""Backend -> the option and the file that configure sharding; the script gives the file its absolute path."""


def _start(spec: Spec, layout: Layout, node: int, *, megatron: bool) -> str:
    """Return bash code, from a comment to `exec`: train.yaml converted to arguments, and one torchrun."""
    job = spec.job
    option, file = _FILES.get(layout.backend, ("", ""))
    context = {"option": option, "file": file, "megatron": megatron, "samples": samples_argument(spec)}
    text = render("swift/start.sh.j2", {**context, "stage": job.stage, "adapters": job.finetuning == "lora"})
    module = f"swift.cli.{'_megatron.' if megatron else ''}{job.stage}"
    return text + torchrun_command(spec, node, f'-m {module} "${{arguments[@]}}"')


# The trainer ----------------------------------------------------------------------------------------------------------


def _versions() -> Mapping[str, Any]:
    return {"ms_swift": [swift_versions()[0], READ_AT]}


def _steps(job: Job, keys: Mapping[str, Any]) -> int | None:
    return steps(job, in_terms_of("swift sft", keys))


def _megatron_steps(job: Job, keys: Mapping[str, Any]) -> int | None:
    return steps(job, in_terms_of("megatron sft", keys), key="train_iters", drops_last=True)


_BRIDGE = ("megatron-core", "mcore-bridge", "Transformer Engine")
_MEGATRON = TrainingPath(
    backends=("megatron",),
    traits=TRAITS,
    packages={"megatron": _BRIDGE, "mca": _BRIDGE},
    job_refusals=megatron_job_refusals,
    refusals=megatron_refusals,
    steps=_megatron_steps,
    files=megatron_files,
    run=_run_megatron,
    start=partial(_start, megatron=True),
    versions=_versions,
    trial=MEGATRON_TRIAL,
    codec=megatron_job.CODEC,
)
_SFT = TrainingPath(
    backends=tuple(PACKED_APART),
    traits=PACKED_APART,
    packages={"ddp": (), "deepspeed": ("DeepSpeed",), "fsdp2": ()},
    caveats=loading_caveats,
    refusals=sharded_refusals,
    steps=_steps,
    files=sft_files,
    run=_run,
    start=partial(_start, megatron=False),
    versions=_versions,
    trial=TRIAL,
    codec=sft_job.CODEC,
)
_LOG = Log(
    bar=tqdm_bar("(?:Train:)?"),
    loss=loss_key("loss"),
    steps=re.compile(
        r"""["'](?:global_step/max_steps|iteration)["']: ?["'](?P<step>[0-9]{1,12})/(?P<total>[0-9]{1,12})["']""",
    ),
    elapsed=re.compile(
        r"""["']elapsed_time["']: ?["'](?:(?P<days>[0-9]{1,6})d )?(?:(?P<hours>[0-9]{1,2})h )?"""
        r"""(?:(?P<minutes>[0-9]{1,2})m )?(?P<seconds>[0-9]{1,2})s["']"""
    ),
    mean_time=re.compile(
        rf"""["']train_speed\((?:s/it\)["']: ?["']?(?P<s>{FIGURE})|iter/s\)["']: ?["']?(?P<per_s>{FIGURE}))"""
    ),
    reserved=value_of(r"memory\(GiB\)", "gib"),
)
"""ms-swift replaces transformers' callbacks with its own: the bar is titled `Train`, and the line with the loss
includes the step, the number of steps and the time since the first step (swift/trainers/patcher.py, add_train_message;
swift/utils/utils.py, format_time). `megatron sft` prints a similar line from the last rank
(swift/megatron/callbacks/print.py). Both also write it to logging.jsonl. `train_speed` is the mean since the start.
`memory(GiB)` is the peak reserved memory: of one rank, or with `megatron sft` of a group of ranks."""

MS_SWIFT = Trainer(
    name="swift",
    title=_VERSIONS.title,
    training_paths=(_MEGATRON, _SFT),
    log=_LOG,
    versions=_VERSIONS,
    recognizers=(SWIFT, MEGATRON),
    rules="topoplan.trainers.swift.rules",
    unwritten=("dpo",),
    usual_for=("lora",),
)
