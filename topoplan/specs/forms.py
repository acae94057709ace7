"""The schema of a spec file: the blocks that are checked before they become a cluster, a model and a job.

A form checks each value on its own and parses quantities into base units; `build_cluster` and `build_job` check the
values against each other. The schema of a calibration profile is in `profile_form`. Only code that reads files imports
this module, and with it pydantic.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model, model_validator
from pydantic_core import PydanticCustomError

from topoplan import catalog
from topoplan.specs.blocks import Block, as_in, key, tidied
from topoplan.specs.cluster import (
    MOST_GPUS,
    BatchOptions,
    Cluster,
    Cores,
    Environment,
    Fabric,
    GpusPerNode,
    Host,
    Margin,
    Nics,
    Nodes,
    SecretNames,
    Sockets,
    Software,
)
from topoplan.specs.job import Job
from topoplan.specs.kinds import (
    ARCHITECTURE,
    BYTES,
    GPU_NAME,
    LATENCY,
    RATE,
    SPEED,
    Choice,
    Count,
    Number,
    Quantity,
    Text,
)
from topoplan.specs.layout_parts import (
    BACKENDS,
    SIZE_KEYS,
    Degrees,
    Recompute,
    Sharding,
    StageSizes,
    Step,
    Switches,
)
from topoplan.specs.lengths import LENGTHS


class Form(BaseModel):
    """A block of keys as a pydantic model, which records the keys that were given."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, protected_namespaces=(), defer_build=True
    )
    short_key: ClassVar[str] = ""
    """See `Block.short_key`."""
    list_of_keys: ClassVar[str] = ""
    """A command that lists the keys, if there are too many for a message."""

    @model_validator(mode="before")
    @classmethod
    def _tidy(cls, value: Any) -> Any:
        return tidied(value, cls.short_key)

    def given(self) -> dict[str, Any]:
        """Return the keys that were given, with their values."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuForm(Block):
    """A GPU: a catalog name, or a block with its figures. A catalog name fills in what the block leaves out."""

    # Fields are named as in `Gpu`.
    short_key: ClassVar[str] = "name"

    name: Annotated[str, GPU_NAME] = key(
        "Name of the card; one of `topoplan show gpus`, or your own.", "h100-sxm-80gb", default=MISSING
    )
    memory_bytes: Annotated[int | None, Quantity(BYTES, 2**30, 2**43, "1GiB to 8TiB")] = key(
        "Memory that the driver reports (nvidia-smi's memory.total), with unit.", "81559MiB", alias="memory"
    )
    memory_bytes_per_s: Annotated[float | None, Quantity(RATE, 5e10, 2e14, "50GB/s to 200TB/s")] = key(
        "Bandwidth of the device memory, with unit.", "3.35TB/s", alias="memory_bandwidth"
    )
    bf16_flops: Annotated[float | None, SPEED] = key("Dense bf16 peak, in TFLOPS.", 989, alias="bf16_tflops")
    fp16_flops: Annotated[float | None, SPEED] = key(
        "Dense fp16 peak, in TFLOPS; left out: as bf16.", 989, alias="fp16_tflops"
    )
    fp8_flops: Annotated[float | None, SPEED] = key(
        "Dense fp8 peak, in TFLOPS; left out: the card has none.", 1979, alias="fp8_tflops"
    )
    fp4_flops: Annotated[float | None, SPEED] = key(
        "Dense fp4 peak, in TFLOPS; left out: the card has none.", 9000, alias="fp4_tflops"
    )
    architecture: Annotated[str | None, ARCHITECTURE] = key(
        "Generation of the chip; left out: guessed from the precisions given."
    )
    sm_count: Annotated[int | None, Count(1, 10_000)] = key("Streaming multiprocessors.", 132)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm(Block):
    """The model: a name, a directory, the path of a config.json, or the config itself."""

    short_key: ClassVar[str] = "name"

    name: Annotated[str | None, Text(meaning="a model's name or path")] = key(
        "A name of `topoplan show models`, a directory with config.json, or the path of a config.json.", "Qwen/Qwen3-8B"
    )
    config: dict[str, Any] | None = key("The fields of a Hugging Face config.json.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricForm(Block, Fabric):
    """The network between the nodes."""

    short_key: ClassVar[str] = "kind"

    latency_s: Annotated[float | None, LATENCY] = key(  # type: ignore[assignment]
        "Time of one small message, NIC to NIC, with unit.", "5us", alias="latency"
    )
    oversubscription: Annotated[float, Number(1, 64)] = key(
        "A leaf's downlinks over its uplinks; 1 is non-blocking.", default=1.0
    )
    uplinks_per_leaf: Annotated[int | None, Count(0, MOST_GPUS)] = key(
        "The same said as the uplinks of a leaf, each as fast as a NIC; needs nodes_per_leaf."
    )


def form_of(*parts: type) -> type[Form]:
    """Return a form with the fields declared in `parts`, all optional."""
    keys: dict[str, Any] = {
        key.name: (Annotated[Any, key.metadata["kind"]], Field(default=None, description=key.metadata["description"]))
        for part in parts
        for key in dataclasses.fields(part)
    }
    return create_model("_Keys", __base__=Form, **keys)


class RecomputeForm(form_of(Recompute)):  # type: ignore[misc]  # the base is made of a declaration
    """Required settings of activation recomputation."""

    short_key: ClassVar[str] = "granularity"


class PinForm(form_of(Degrees, StageSizes, Step, Sharding, Switches)):  # type: ignore[misc]
    """Layout keys with required values."""

    backend: Annotated[str | None, Choice(BACKENDS)] = Field(default=None)
    recompute: RecomputeForm | None = Field(default=None)
    main_grads_dtype: Annotated[str | None, Choice(("fp32", "bf16"))] = Field(
        default=None, description="grad_reduce_in_fp32 as precision_aware_optimizer has it."
    )

    @model_validator(mode="after")
    def _gradients(self) -> PinForm:
        """Check main_grads_dtype as Megatron-LM's `optimizer/optimizer_config.py` and `training/arguments.py` do."""
        keys, dtype = super().given(), self.main_grads_dtype
        what = ""
        if dtype == "bf16" and not keys.get("precision_aware_optimizer"):
            what = "main_grads_dtype bf16 without precision_aware_optimizer"
        elif dtype and keys.get("grad_reduce_in_fp32", dtype == "fp32") != (dtype == "fp32"):
            what = f"main_grads_dtype {dtype} beside grad_reduce_in_fp32 {keys['grad_reduce_in_fp32']}".lower()
        if what:
            parts = {"what": what, "expected": "", "remedy": "leave it out", "key": "main_grads_dtype"}
            raise PydanticCustomError("value", "{what}", parts)
        return self

    def given(self) -> dict[str, Any]:
        """Return the given keys: main_grads_dtype becomes grad_reduce_in_fp32, and false stage sizes are dropped."""
        keys = {key: value for key, value in super().given().items() if key not in SIZE_KEYS or value is not False}
        if dtype := keys.pop("main_grads_dtype", None):
            keys["grad_reduce_in_fp32"] = dtype == "fp32"
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForm(Block, Job):
    """What is trained, on which data, in which precision."""

    lengths: Annotated[tuple[tuple[int, int], ...] | str | None, LENGTHS] = key(  # type: ignore[assignment]
        "How many samples have how many tokens: [tokens, count] pairs, a mapping, or the path of a CSV or JSON file, "
        "relative to this one; with stage dpo how many answers, two a sample, each with its prompt. In place of "
        "reading the data set.",
        [[512, 1000], [1024, 300]],
    )
    pin: PinForm | None = key("Fixed layout keys.")  # type: ignore[assignment]


NVLINK = Quantity(RATE, 1e10, 1e13, "10GB/s to 10TB/s for each GPU, or none", may_be_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecForm(Block):
    """A cluster, a model and a fine-tuning job, for topoplan."""

    name: Annotated[
        str | None,
        Text(pattern=r"[A-Za-z0-9_][A-Za-z0-9._-]*", meaning="letters, digits, `.`, `_` and `-`", longest=64),
    ] = key("Names the bundle's directory; left out: the file's name.", "h100-4x8")
    nodes: Nodes | None = key("Machines.", 4)
    gpus_per_node: GpusPerNode | None = key("GPUs in a machine.", 8)
    gpu: GpuForm = key("A name of `topoplan show gpus`, or a block of figures.", "h100-sxm-80gb", default=MISSING)
    nvlink_bandwidth: Annotated[float | None, NVLINK] = key(
        "NVLink of one GPU, both directions together, as vendors quote it, with unit; none: the GPUs of a node talk "
        "over PCIe. Left out: as in the usual machine of the GPU.",
        "900GB/s",
    )
    ib_bandwidth: Annotated[float | None, Quantity(RATE, 1.25e7, 2.5e11, "100Mb/s to 2000Gb/s for each NIC")] = key(
        "Network of one NIC (InfiniBand, RoCE or Ethernet), each way, with unit. Left out: as in the usual machine of "
        "the GPU.",
        "400Gb/s",
    )
    nics_per_node: Nics | None = key("NICs that the GPUs use; left out: as in the usual machine of the GPU.", 8)
    model: ModelForm | None = key(
        "A name of `topoplan show models`, a directory with config.json, or the path of a config.json.", "Qwen/Qwen3-8B"
    )
    job: JobForm | None = key("The fine-tuning job.")
    trained_by: Annotated[str | None, Text(pattern="[a-z]+", meaning="a trainer's name")] = key(
        "Trainer of the plans: llamafactory, swift or trinity; left out: any. The option --trainer overrides it.",
        "swift",
    )
    hosts: tuple[Host, ...] = as_in(Cluster, "hosts")
    fabric: FabricForm | None = key("The network between the nodes.")
    host_memory: Annotated[int | None, Quantity(BYTES, 2**30, 2**50, "1GiB to 1PiB")] = key(
        "Main memory of a machine, with unit.", "2TB"
    )
    storage_bandwidth: Annotated[float | None, Quantity(RATE, 1e6, 1e12, "1MB/s to 1TB/s")] = key(
        "Rate at which one machine reads the model and writes its part of a checkpoint, with unit; left out: 1GB/s.",
        "1GB/s",
    )
    cpu_cores: Cores | None = as_in(Cluster, "cpu_cores")
    pcie_bandwidth: Annotated[float | None, Quantity(RATE, 2.5e8, 1e12, "250MB/s to 1TB/s")] = key(
        "PCIe link of one GPU, each way, with unit.", "64GB/s"
    )
    sockets: Sockets | None = key(
        "CPU sockets of a machine, over which its GPUs and NICs are spread; left out: 2, or 1 for up to four PCIe "
        "cards."
    )
    env: Environment = as_in(Cluster, "env")
    secrets: SecretNames = as_in(Cluster, "secrets")
    software: Software = as_in(Cluster, "software")
    slurm: BatchOptions = as_in(Cluster, "slurm")
    margin: Margin | None = as_in(Cluster, "margin")
    profile: Annotated[str | None, Text(meaning="a path")] = key(
        "File of a calibration profile of your own, relative to this file; see `topoplan show profile`.",
        "profiles/h100.yaml",
    )


def schema_of_spec() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the spec file."""
    schema = TypeAdapter(SpecForm).json_schema()
    _drop_noise(schema)
    blocks = schema["$defs"]
    for form in (ModelForm, Host, RecomputeForm):
        block = blocks[form.__name__]
        blocks[form.__name__] = {"anyOf": [block["properties"][form.short_key], block]}
    # A bare name must be in the catalog; a name in a block may be new.
    name = {"type": "string", "enum": list(catalog.gpu_names())}
    told = {key: value for key, value in schema["properties"]["gpu"].items() if key in ("description", "examples")}
    gpu = {**told, "anyOf": [name, {"$ref": "#/$defs/GpuForm"}]}
    schema["properties"] = {"$schema": {"type": "string"}, **schema["properties"], "gpu": gpu}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "topoplan spec"}


def _drop_noise(node: Any) -> None:
    """Remove pydantic's additions that no reader needs: titles of keys, empty defaults, the null branch."""
    if isinstance(node, list):
        for item in node:
            _drop_noise(item)
    elif isinstance(node, dict):
        for value in node.values():
            _drop_noise(value)
        if isinstance(node.get("title"), str):
            del node["title"]
        if "default" in node and node["default"] in (None, []):
            del node["default"]
        branches = [branch for branch in node.get("anyOf", ()) if branch != {"type": "null"}]
        if len(branches) == 1:
            del node["anyOf"]
            node.update({**branches[0], **node})
        elif branches:
            node["anyOf"] = branches
