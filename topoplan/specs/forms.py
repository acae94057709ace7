"""The files that people write: their keys, block by block, and what each may hold. Most of it is the spec file.

A form checks one value at a time and parses quantities into base units; what several values mean together is worked
out in `build`. The file of a calibration profile is in `profile_form`. Forms, their kinds of value and `mistakes` are
the only modules that import pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic import model_validator as _model_validator
from pydantic_core import core_schema

from topoplan.specs.cluster import MOST_GPUS, FabricKind
from topoplan.specs.kinds import (
    DEGREE,
    LATENCY,
    PATH,
    SPEED,
    Architecture,
    BatchOptions,
    Choice,
    Count,
    Environment,
    Fraction,
    LengthHistogram,
    Number,
    PassedThrough,
    SecretNames,
    Switch,
    Text,
    Versions,
    Words,
    amount,
    rate,
)


class Form(BaseModel):
    """A block of keys. A key without a value (null) counts as left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, protected_namespaces=())
    short_key: ClassVar[str] = ""
    """The key that a bare text in place of the block stands for: `gpu: h100-sxm-80gb`."""
    list_of_keys: ClassVar[str] = ""
    """What lists the keys, where they are too many for a message."""

    @_model_validator(mode="before")
    @classmethod
    def _tidy(cls, value: Any) -> Any:
        if cls.short_key and isinstance(value, str):
            return {cls.short_key: value}
        if isinstance(value, Mapping):
            return {key: content for key, content in value.items() if content is not None}
        return value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        block = handler(schema)
        if not cls.short_key:
            return block
        properties = handler.resolve_ref_schema(block)["properties"]
        return {"anyOf": [properties[cls.short_key], block]}

    def given(self) -> dict[str, Any]:
        """The keys that were given, with their values."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


class GpuForm(Form):
    """A GPU: a name of the catalog, or a block with its figures. A catalog name fills in what the block leaves out."""

    short_key: ClassVar[str] = "name"

    name: Annotated[str, Text(pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*", meaning="a GPU's name", longest=64)] = Field(
        description="Name of the card; one of `topoplan gpus`, or your own.", examples=["h100-sxm-80gb"]
    )
    memory: Annotated[int | None, amount(2**30, 2**43, "1GiB to 8TiB")] = Field(
        default=None,
        description="Memory that the driver reports (nvidia-smi's memory.total), with unit.",
        examples=["81559MiB"],
    )
    memory_bandwidth: Annotated[float | None, rate(5e10, 2e14, "50GB/s to 200TB/s")] = Field(
        default=None, description="Bandwidth of the device memory, with unit.", examples=["3.35TB/s"]
    )
    bf16_tflops: Annotated[float | None, SPEED] = Field(
        default=None, description="Dense bf16 peak, in TFLOPS.", examples=[989]
    )
    fp16_tflops: Annotated[float | None, SPEED] = Field(
        default=None, description="Dense fp16 peak, in TFLOPS; left out: as bf16.", examples=[989]
    )
    fp8_tflops: Annotated[float | None, SPEED] = Field(
        default=None, description="Dense fp8 peak, in TFLOPS; left out: the card has none.", examples=[1979]
    )
    fp4_tflops: Annotated[float | None, SPEED] = Field(
        default=None, description="Dense fp4 peak, in TFLOPS; left out: the card has none.", examples=[9000]
    )
    architecture: Annotated[str | None, Architecture()] = Field(
        default=None, description="Generation of the chip; left out: guessed from the precisions given."
    )
    sm_count: Annotated[int | None, Count(1, 10_000)] = Field(
        default=None, description="Streaming multiprocessors.", examples=[132]
    )


class ModelForm(Form):
    """The model: a name, a directory, a config.json, or the config itself."""

    short_key: ClassVar[str] = "name"

    name: Annotated[str | None, Text(meaning="a model's name or path")] = Field(
        default=None,
        description="A name of `topoplan models`, a directory with config.json, or the path of a config.json.",
        examples=["Qwen/Qwen3-8B"],
    )
    config: dict[str, Any] | None = Field(default=None, description="The fields of a Hugging Face config.json.")


class HostForm(Form):
    """A machine: its address, or a block that says how to reach and use it."""

    short_key: ClassVar[str] = "address"

    # A leading `-` would be an option to ssh.
    address: Annotated[
        str, Text(pattern=r"[A-Za-z0-9_:\[][A-Za-z0-9._:%\[\]-]*", meaning="a host name or address, without user@")
    ] = Field(description="Name or address for SSH and the rendezvous.", examples=["node0"])
    user: Annotated[str | None, Text(pattern=r"[A-Za-z0-9_][A-Za-z0-9._@-]*", meaning="a user name")] = Field(
        default=None, description="SSH user; left out: SSH's own default."
    )
    port: Annotated[int | None, Count(1, 65535)] = Field(
        default=None, description="SSH port; left out: SSH's own default."
    )
    workdir: Annotated[str | None, PATH] = Field(
        default=None, description="Absolute directory on the host in which the run starts."
    )
    venv: Annotated[str | None, PATH] = Field(
        default=None, description="Absolute path of the trainer's Python virtual environment on the host."
    )
    socket_interface: Annotated[
        str | None,
        Text(pattern=r"[A-Za-z0-9_][A-Za-z0-9._@:-]*", meaning="a network interface such as eth0", longest=64),
    ] = Field(default=None, description="Network interface of NCCL's and Gloo's sockets.", examples=["eth0"])
    hcas: Annotated[
        list[str] | None, Words(pattern=r"[A-Za-z0-9_][A-Za-z0-9._-]*(:[0-9]+)?", meaning="adapters such as mlx5_0:1")
    ] = Field(
        default=None,
        description="InfiniBand or RoCE adapters to use; with fabric kind tcpxo the interfaces of the GPUs' NICs.",
        examples=[["mlx5_0", "mlx5_1"]],
    )


class FabricForm(Form):
    """The network between the nodes."""

    kind: Annotated[FabricKind | None, Choice(get_args(FabricKind))] = Field(
        default=None,
        description="infiniband, roce, efa (AWS), tcpxo (GPUDirect-TCPXO of Google's A3 Mega), or ethernet for plain "
        "TCP sockets.",
    )
    latency: Annotated[float | None, LATENCY] = Field(
        default=None, description="Time of one small message, NIC to NIC, with unit.", examples=["5us"]
    )
    rails: Annotated[int | None, Count(1, 64)] = Field(
        default=None,
        description="Leaf planes: NIC i of every node is on plane i modulo rails. Left out: one plane for all NICs.",
    )
    nodes_per_leaf: Annotated[int | None, Count(1, MOST_GPUS)] = Field(
        default=None,
        description=(
            "Nodes on one leaf switch (in one rail). Left out: all of them; with oversubscription above 1 each its own."
        ),
    )
    oversubscription: Annotated[float | None, Number(1, 64)] = Field(
        default=None, description="A leaf's downlinks over its uplinks; 1 is non-blocking."
    )
    uplinks_per_leaf: Annotated[int | None, Count(0, MOST_GPUS)] = Field(
        default=None,
        description="The same said as the uplinks of a leaf, each as fast as a NIC; needs nodes_per_leaf.",
    )
    traffic_class: Annotated[int | None, Count(0, 255)] = Field(
        default=None,
        description="Traffic class of NCCL's packets (NCCL_IB_TC), with roce and infiniband: DSCP times 4, plus 2 with "
        "ECN. Whoever runs the network knows it: where PFC follows DSCP, NCCL's own, 0, is a queue that drops packets.",
        examples=[106],
    )
    service_level: Annotated[int | None, Count(0, 15)] = Field(
        default=None, description="Service level of NCCL's packets (NCCL_IB_SL), with roce and infiniband."
    )
    topology_file: Annotated[str | None, PATH] = Field(
        default=None,
        description="NCCL's topology file (NCCL_TOPO_FILE) on every host, for virtual machines that hide which NIC is "
        "near which GPU.",
        examples=["/opt/microsoft/ndv5-topo.xml"],
    )


class RecomputeForm(Form):
    """Activation recomputation that must hold."""

    short_key: ClassVar[str] = "granularity"

    granularity: Annotated[str | None, Choice(("none", "selective", "full"))] = Field(default=None)
    modules: Annotated[
        list[str] | None,
        Words(
            pattern="core_attn|mlp|moe|moe_act|layernorm|mla_up_proj|shared_experts",
            meaning="core_attn, mlp, moe, moe_act, layernorm, mla_up_proj, shared_experts",
        ),
    ] = Field(default=None, description="With selective.")
    method: Annotated[str | None, Choice(("uniform", "block"))] = Field(default=None, description="With full.")
    num_layers: Annotated[int | None, Count(1, 10_000)] = Field(default=None, description="With full.")


class PinForm(Form):
    """Layout keys that must hold."""

    backend: Annotated[str | None, Choice(("mca", "megatron", "ddp", "deepspeed", "fsdp2"))] = Field(default=None)
    tp: Annotated[int | None, DEGREE] = Field(default=None, description="Tensor parallel.")
    pp: Annotated[int | None, DEGREE] = Field(default=None, description="Pipeline parallel.")
    vpp: Annotated[int | None, DEGREE] = Field(default=None, description="Virtual pipeline stages per GPU.")
    cp: Annotated[int | None, DEGREE] = Field(default=None, description="Context parallel.")
    ep: Annotated[int | None, DEGREE] = Field(default=None, description="Expert parallel.")
    etp: Annotated[int | None, DEGREE] = Field(default=None, description="Tensor parallel of the experts.")
    dp: Annotated[int | None, DEGREE] = Field(default=None, description="Data parallel: world / (tp * pp * cp).")
    micro_batch_size: Annotated[int | None, DEGREE] = Field(default=None)
    gradient_accumulation_steps: Annotated[int | None, DEGREE] = Field(default=None)
    sequence_parallel: Annotated[bool | None, Switch()] = Field(default=None)
    recompute: RecomputeForm | None = Field(default=None)
    distributed_optimizer: Annotated[bool | None, Switch()] = Field(default=None)
    pipeline_layout: Annotated[
        str | None, Text(pattern=r"[A-Za-z0-9|,*()]+", meaning="Megatron's layout, such as Et*4|t*5|t*4,L")
    ] = Field(default=None)
    optimizer_offload_fraction: Annotated[float | None, Number(0, 1)] = Field(default=None)
    grad_reduce_in_fp32: Annotated[bool | None, Switch()] = Field(default=None)
    overlap_grad_reduce: Annotated[bool | None, Switch()] = Field(default=None)
    overlap_param_gather: Annotated[bool | None, Switch()] = Field(default=None)
    cross_entropy_fusion: Annotated[bool | None, Switch()] = Field(default=None)
    fp8_param: Annotated[bool | None, Switch()] = Field(default=None)
    cross_entropy_fusion_impl: Annotated[str | None, Choice(("te", "native"))] = Field(default=None)
    precision_aware_optimizer: Annotated[bool | None, Switch()] = Field(default=None)
    moe_token_dispatcher_type: Annotated[str | None, Choice(("alltoall", "flex"))] = Field(default=None)
    zero_stage: Annotated[int | None, Count(1, 3)] = Field(default=None, description="With deepspeed.")
    offload_optimizer: Annotated[bool | None, Switch()] = Field(default=None, description="With deepspeed.")
    offload_param: Annotated[bool | None, Switch()] = Field(default=None, description="With deepspeed, stage 3.")
    sharding: Annotated[str | None, Choice(("full", "hybrid"))] = Field(default=None, description="With fsdp2.")
    offload: Annotated[bool | None, Switch()] = Field(default=None, description="With fsdp2: CPU offload.")
    sync_each_batch: Annotated[bool | None, Switch()] = Field(
        default=None, description="With fsdp2: gradients are reduced after every micro batch, not after the last alone."
    )
    ulysses: Annotated[int | None, DEGREE] = Field(
        default=None, description="Sequence parallel by all-to-all, of fsdp2 and deepspeed."
    )
    fused_linear_cross_entropy: Annotated[bool | None, Switch()] = Field(
        default=None, description="Liger's loss, without whole logits; of ddp, deepspeed and fsdp2."
    )
    expandable_segments: Annotated[bool | None, Switch()] = Field(
        default=None, description="torch's allocator with expandable segments; of ddp, deepspeed and fsdp2."
    )


class JobForm(Form):
    """What is trained, on what, in which numbers."""

    seq_len: Annotated[int, Count(1, 10_000_000)] = Field(
        description="Tokens in a sequence: LLaMA-Factory's cutoff_len.", examples=[4096]
    )
    global_batch_size: Annotated[int, Count(1, 1_000_000)] = Field(
        description="Sequences in an optimizer step, over all GPUs.", examples=[64]
    )
    finetuning: Annotated[str | None, Choice(("full", "freeze", "lora", "qlora"))] = Field(
        default=None, description="Which parameters are trained."
    )
    stage: Annotated[str | None, Choice(("pt", "sft", "dpo"))] = Field(
        default=None, description="Pre-training, supervised fine-tuning or direct preference optimization."
    )
    precision: Annotated[str | None, Choice(("bf16", "fp16", "fp8", "mxfp8", "nvfp4"))] = Field(
        default=None, description="Number format of the matrix multiplications."
    )
    dataset: Annotated[str | None, Text()] = Field(
        default=None,
        description="Data sets by their names in dataset_info.json, with commas. When their JSON files are on this "
        "machine, the lengths of their samples are read; so are those of a .json or .jsonl file given here.",
    )
    dataset_dir: Annotated[str | None, Text(meaning="a path")] = Field(
        default=None, description="Directory of dataset_info.json, on every node."
    )
    template: Annotated[str | None, Text(pattern=r"[A-Za-z0-9._-]+", meaning="a template's name")] = Field(
        default=None, description="LLaMA-Factory's chat template.", examples=["qwen3_vl"]
    )
    packing: Annotated[bool | None, Switch()] = Field(
        default=None,
        description="Samples are packed to seq_len, so that every position is a real token. In stage pt on by default.",
    )
    lengths: Annotated[tuple[tuple[int, int], ...] | str | None, LengthHistogram()] = Field(
        default=None,
        description="How many samples have how many tokens: [tokens, count] pairs, a mapping, or the path of a CSV or "
        "JSON file, relative to this one. In place of reading the data set.",
        examples=[[[512, 1000], [1024, 300]]],
    )
    samples: Annotated[int | None, Count(1, 10**12)] = Field(
        default=None,
        description="Sequences in the data set (packed ones with packing); gives hours and GPU-hours. Left out: as the "
        "lengths of the samples tell.",
    )
    epochs: Annotated[float | None, Number(1e-6, 10_000)] = Field(default=None, description="Passes over the data.")
    learning_rate: Annotated[float | None, Number(1e-12, 1)] = Field(
        default=None, description="Peak learning rate; else 2e-5, 1e-4 of adapters, 5e-6 of DPO."
    )
    lora_rank: Annotated[int | None, Count(1, 8192)] = Field(default=None, description="Rank with lora and qlora.")
    lora_target: Annotated[
        list[str] | None,
        Words(pattern=r"[A-Za-z0-9_][A-Za-z0-9_.]*", meaning="names of linear layers, or all"),
    ] = Field(
        default=None,
        description="Linear layers that get an adapter, by their names in the model, or in Megatron-core's with "
        "backend megatron; by default all.",
        examples=[["q_proj", "v_proj"]],
    )
    quantization_bit: Annotated[int | None, Count(4, 8)] = Field(
        default=None, description="Bits of the frozen weights with qlora, 4 or 8; by default 4."
    )
    freeze_trainable_layers: Annotated[int | None, Count(-1000, 1000)] = Field(
        default=None, description="With freeze: how many of the last layers are trained; negative for the first ones."
    )
    pure_bf16: Annotated[bool | None, Switch()] = Field(
        default=None, description="Weights and optimizer in bf16, without fp32 copies; not with Megatron."
    )
    optimizer: Annotated[str | None, Choice(("adamw", "adamw_8bit"))] = Field(
        default=None, description="adamw, or adamw_8bit with its moments in 8 bits; the latter not with Megatron."
    )
    freeze_vision_tower: Annotated[bool | None, Switch()] = Field(
        default=None, description="The vision encoder is not trained."
    )
    freeze_multi_modal_projector: Annotated[bool | None, Switch()] = Field(
        default=None, description="The projector between vision and language is not trained."
    )
    freeze_language_model: Annotated[bool | None, Switch()] = Field(
        default=None, description="The language model is not trained."
    )
    image_max_pixels: Annotated[int | None, Count(28 * 28, 10**9)] = Field(
        default=None, description="Pixels above which an image is scaled down."
    )
    images_per_sequence: Annotated[float | None, Number(0, 10_000)] = Field(
        default=None, description="Images in a (packed) sequence, on average; for vision-language models."
    )
    token_imbalance: Annotated[float | None, Number(1, 64)] = Field(
        default=None,
        description="Tokens of the busiest rank's experts over the average; for a mixture of experts with ep > 1.",
    )
    mtp_num_layers: Annotated[int | None, Count(0, 16)] = Field(
        default=None, description="Multi-token-prediction layers that are trained with the model; left out: none."
    )
    trainer: Annotated[dict[str, Any] | None, PassedThrough()] = Field(
        default=None, description="Any other keys of the trainer's YAML, passed through."
    )
    pin: PinForm | None = Field(default=None, description="Layout keys that must hold.")


class SpecForm(Form):
    """A cluster, a model and a fine-tuning job, for topoplan."""

    name: Annotated[
        str | None,
        Text(pattern=r"[A-Za-z0-9_][A-Za-z0-9._-]*", meaning="letters, digits, `.`, `_` and `-`", longest=64),
    ] = Field(
        default=None, description="Names the bundle's directory; left out: the file's name.", examples=["h100-4x8"]
    )
    nodes: Annotated[int | None, Count(1, MOST_GPUS)] = Field(default=None, description="Machines.", examples=[4])
    gpus_per_node: Annotated[int | None, Count(1, 144)] = Field(
        default=None, description="GPUs in a machine.", examples=[8]
    )
    gpu: GpuForm = Field(description="A name of `topoplan gpus`, or a block of figures.", examples=["h100-sxm-80gb"])
    nvlink_bandwidth: Annotated[float | None, rate(1e10, 1e13, "10GB/s to 10TB/s for each GPU")] = Field(
        default=None,
        description=(
            "NVLink of one GPU, both directions together, as vendors quote it, with unit. Left out: the GPUs talk "
            "over PCIe; but with ib_bandwidth and nics_per_node left out too: the usual machine of the GPU."
        ),
        examples=["900GB/s"],
    )
    ib_bandwidth: Annotated[float | None, rate(1.25e7, 2.5e11, "100Mb/s to 2000Gb/s for each NIC")] = Field(
        default=None,
        description="Network of one NIC (InfiniBand, RoCE or Ethernet), each way, with unit. Needed above one node.",
        examples=["400Gb/s"],
    )
    nics_per_node: Annotated[int | None, Count(1, 64)] = Field(
        default=None, description="NICs that the GPUs use; left out: as in the usual machine of the GPU.", examples=[8]
    )
    model: ModelForm | None = Field(
        default=None,
        description="A name of `topoplan models`, a directory with config.json, or the path of a config.json.",
        examples=["Qwen/Qwen3-8B"],
    )
    job: JobForm | None = Field(default=None, description="The fine-tuning job.")
    hosts: list[HostForm] | None = Field(default=None, description="The machines, one for each node; rank 0 first.")
    fabric: FabricForm | None = Field(default=None, description="The network between the nodes.")
    host_memory: Annotated[int | None, amount(2**30, 2**50, "1GiB to 1PiB")] = Field(
        default=None, description="Main memory of a machine, with unit.", examples=["2TB"]
    )
    cpu_cores: Annotated[int | None, Count(1, 10_000)] = Field(default=None, description="CPU cores of a machine.")
    pcie_bandwidth: Annotated[float | None, rate(2.5e8, 1e12, "250MB/s to 1TB/s")] = Field(
        default=None, description="PCIe link of one GPU, each way, with unit.", examples=["64GB/s"]
    )
    sockets: Annotated[int | None, Count(1, 8)] = Field(
        default=None,
        description="CPU sockets of a machine, over which its GPUs and NICs are spread; left out: 2, or 1 for up to "
        "four PCIe cards.",
    )
    env: Annotated[dict[str, str] | None, Environment()] = Field(
        default=None, description="Environment variables for the trainer, passed through."
    )
    secrets: Annotated[list[str] | None, SecretNames()] = Field(
        default=None,
        description="Names of variables that the trainer needs and no file may hold: `topoplan launch` takes their "
        "values from the environment that it is called in.",
        examples=[["HF_TOKEN", "WANDB_API_KEY"]],
    )
    software: Annotated[dict[str, str] | None, Versions()] = Field(
        default=None,
        description="What the hosts have: the version of python, and of packages as pip lists them. Plans then say "
        "what these versions cannot do, and what cannot be had on this Python.",
        examples=[{"python": "3.12", "torch": "2.11.0"}],
    )
    slurm: Annotated[dict[str, str | bool] | None, BatchOptions()] = Field(
        default=None,
        description="Options of sbatch for the job script of Slurm, by their long names; they take the place of "
        "topoplan's own. true is an option without a value, false leaves out one of topoplan's.",
        examples=[{"partition": "gpu", "time": "24:00:00"}],
    )
    margin: Annotated[float | None, Fraction()] = Field(
        default=None,
        description="Part of the card that a plan must leave free; by default the error band of the prediction.",
        examples=["8%"],
    )
    profile: Annotated[str | None, Text(meaning="a path")] = Field(
        default=None,
        description="File of a calibration profile of your own, relative to this file; see `topoplan profile`.",
        examples=["profiles/h100.yaml"],
    )
