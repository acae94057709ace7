"""Round trips from layout to keys and back, for every training path that files are written for and read from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.reading.setups import all_of, configuration, launch
from topoplan.errors import InputError
from topoplan.layout.forms import layout_to_dict
from topoplan.layout.layout import Layout, changed
from topoplan.lint.translate import translate
from topoplan.operators.dispatch import dispatcher_of
from topoplan.planner.predict import predict
from topoplan.specs.facts import facts_of
from topoplan.specs.load import load_spec
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.registry import written_by

DENSE, EXPERTS = load_spec("cluster_specs/h100-4x8.yaml"), load_spec("cluster_specs/h20-2x8.yaml")
SPLIT = {
    "tp": st.sampled_from([1, 2, 4]),
    "pp": st.sampled_from([1, 1, 2]),
    "vpp": st.sampled_from([1, 1, 2, 3]),
    "cp": st.sampled_from([1, 1, 2]),
    "micro_batch_size": st.sampled_from([1, 2]),
    "recompute": st.sampled_from(
        ["none", "full", {"modules": ["mlp", "layernorm"]}, {"method": "block", "num_layers": 2}]
    ),
    "optimizer_offload_fraction": st.sampled_from([0.0, 0.5]),
    "distributed_optimizer": st.booleans(),
    "overlap_grad_reduce": st.booleans(),
    "cross_entropy_fusion": st.booleans(),
}
OF_MS_SWIFT = {
    "cp_comm_type": st.sampled_from(["p2p", "a2a"]),
    "gradient_accumulation_fusion": st.booleans(),
    "precision_aware_optimizer": st.booleans(),
    "grad_reduce_in_fp32": st.booleans(),
    "main_params_dtype": st.sampled_from(["fp32", "fp16"]),
    "exp_avg_dtype": st.sampled_from(["fp32", "bf16"]),
    "exp_avg_sq_dtype": st.sampled_from(["fp32", "fp8"]),
    "attention_backend": st.sampled_from(["auto", "fused"]),
    "tp_comm_overlap": st.booleans(),
}
EXPERT = {"ep": st.sampled_from([1, 2, 8]), "etp": st.sampled_from([1, 2])}
SHARDED = {"micro_batch_size": st.sampled_from([1, 2, 4]), "recompute": st.sampled_from(["none", "full"])}
SWITCHES = {"fused_linear_cross_entropy": st.booleans(), "expandable_segments": st.booleans()}
ZERO = {"zero_stage": st.sampled_from([1, 2, 3]), "offload_optimizer": st.booleans(), "offload_param": st.booleans()}
FSDP = {"offload": st.booleans(), "sync_each_batch": st.booleans()}
ULYSSES = {"ulysses": st.sampled_from([1, 2, 4])}
SWIFT = [SHARDED, SWITCHES, ULYSSES]

WAYS: dict[str, tuple[str, str, str, Spec, list[dict[str, Any]]]] = {
    "mca": ("mca", "llamafactory", "mca", DENSE, [SPLIT]),
    "mca with experts": ("mca", "llamafactory", "mca", EXPERTS, [SPLIT, EXPERT]),
    "ms-swift's megatron": ("swift-megatron", "swift", "megatron", DENSE, [SPLIT, OF_MS_SWIFT]),
    "ms-swift's megatron with experts": ("swift-megatron", "swift", "megatron", EXPERTS, [SPLIT, EXPERT]),
    "ddp": ("plain", "llamafactory", "ddp", DENSE, [SHARDED, SWITCHES]),
    "deepspeed": ("plain", "llamafactory", "deepspeed", DENSE, [SHARDED, SWITCHES, ZERO]),
    "fsdp2": ("plain", "llamafactory", "fsdp2", DENSE, [SHARDED, SWITCHES, FSDP]),
    "ms-swift's ddp": ("swift", "swift", "ddp", DENSE, [SHARDED, SWITCHES]),
    "ms-swift's deepspeed": ("swift", "swift", "deepspeed", DENSE, [*SWIFT, ZERO]),
    "ms-swift's fsdp2": ("swift", "swift", "fsdp2", DENSE, [*SWIFT, FSDP]),
}
"""Name -> key of the codec, trainer, backend, spec, layout keys to draw."""


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_what_is_written_is_read_back(way: str, data: st.DataObject, tmp_path: Path) -> None:
    codec, trainer, backend, spec, keys = WAYS[way]
    drawn = {key: value for block in keys for key, value in block.items()}
    spec = replace(spec, trainer=trainer)
    try:
        plan = predict(spec, {"backend": backend, **data.draw(st.fixed_dictionaries(drawn))})
        files = written_by(backend, trainer)[1].written(spec, plan.layout).files
    except InputError:
        assume(False)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    one = configuration(
        files["train.yaml"], trainer=codec if trainer == "swift" else "llamafactory", name=str(tmp_path / "train.yaml")
    )
    others = [
        configuration(text, trainer="accelerate", name=name)
        for name, text in files.items()
        if name == "accelerate.yaml"
    ]
    variables = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{plan.layout.expandable_segments}"}
    variables |= {"USE_MCA": "1"} if codec == "mca" else {}
    nodes, gpus = spec.cluster.nodes, spec.cluster.gpus_per_node
    options = {"nnodes": nodes, "nproc_per_node": gpus}
    if others:
        options = {"num_machines": nodes, "num_processes": nodes * gpus}
    command = launch(
        variables=variables,
        starter="accelerate" if others else "torchrun",
        options={key: str(value) for key, value in options.items()},
        of=one,
    )
    back = translate(one, all_of(one, *others, launches=(command,)), spec.cluster)

    assert back.codec.reads == codec
    assert layout_to_dict(back.layout) == layout_to_dict(as_read(plan.layout, spec))
    said = ("seq_len", "global_batch_size", "precision", "finetuning", "stage", "packing", "mtp_num_layers")
    assert {key: getattr(back.spec.job, key) for key in said} == {key: getattr(spec.job, key) for key in said}


def as_read(layout: Layout, spec: Spec) -> Layout:
    """Return a layout without distinctions that a file cannot express, or with the names that a file uses."""
    if layout.backend != "megatron":
        if layout.backend != "fsdp2":
            return layout
        # accelerate reduces in the compute dtype, which no plan specifies; with one micro-batch, syncing is implied.
        several = layout.gradient_accumulation_steps > 1
        return changed(layout, grad_reduce_in_fp32=False, sync_each_batch=layout.sync_each_batch or not several)
    dispatcher: Any = dispatcher_of(case_of(spec, layout.backend), layout)
    return changed(
        layout,
        precision_aware_optimizer=layout.precision_aware_optimizer or layout.optimizer_offload_fraction > 0,
        cross_entropy_fusion_impl=layout.cross_entropy_fusion_impl if layout.cross_entropy_fusion else "native",
        moe_token_dispatcher_type=dispatcher if facts_of(spec.model).is_moe else None,
    )
