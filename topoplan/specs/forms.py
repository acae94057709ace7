"""The spec file as people write it: its keys, what each may hold, and the words for what is wrong.

The only module that imports pydantic. A form checks one value at a time and parses quantities into base units;
what several values mean together is worked out in `build`. Every kind of value below says its own error, so that
a reader sees one line for a mistake and never pydantic's report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic import model_validator as _model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from topoplan import units
from topoplan.errors import InputError, SpecError, UnitError, nearest
from topoplan.specs.source import KeyPath, plain_scalar
from topoplan.units import quote, shown

_MAX_MESSAGES = 3

# What LLaMA-Factory's YAML calls the things that a spec has a key for. Under `trainer:` they would be written
# twice, with two values; anywhere else they tell what the user was looking for.
TRAINER_KEYS_OF_JOB: Mapping[str, str] = {
    "cutoff_len": "seq_len",
    "finetuning_type": "finetuning",
    "stage": "stage",
    "bf16": "precision",
    "fp16": "precision",
    "dataset": "dataset",
    "dataset_dir": "dataset_dir",
    "template": "template",
    "packing": "packing",
    "num_train_epochs": "epochs",
    "learning_rate": "learning_rate",
    "lora_rank": "lora_rank",
    "freeze_vision_tower": "freeze_vision_tower",
    "freeze_multi_modal_projector": "freeze_multi_modal_projector",
    "freeze_language_model": "freeze_language_model",
    "image_max_pixels": "image_max_pixels",
}
TRAINER_KEYS_OF_LAYOUT: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "sequence_parallel": "sequence_parallel",
    "use_distributed_optimizer": "distributed_optimizer",
    "recompute_granularity": "recompute",
    "recompute_method": "recompute",
    "recompute_num_layers": "recompute",
    "recompute_modules": "recompute",
    "pipeline_model_parallel_layout": "pipeline_layout",
    "optimizer_offload_fraction": "optimizer_offload_fraction",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
}
_OTHER_WORDS: Mapping[str, str] = {
    **TRAINER_KEYS_OF_JOB,
    **TRAINER_KEYS_OF_LAYOUT,
    "model_name_or_path": "model",
    "num_nodes": "nodes",
    "nnodes": "nodes",
    "nproc_per_node": "gpus_per_node",
    "gpus": "gpus_per_node",
    "gpu_type": "gpu",
    "infiniband_bandwidth": "ib_bandwidth",
    "network_bandwidth": "ib_bandwidth",
    "nic_bandwidth": "ib_bandwidth",
    "batch_size": "global_batch_size",
    "sequence_length": "seq_len",
    "max_seq_len": "seq_len",
    "mbs": "micro_batch_size",
    "gas": "gradient_accumulation_steps",
    "sp": "sequence_parallel",
}


# ------------------------------------------------------------------------------------------ kinds of values


class _KeyError(SpecError):
    """A mistake at one key of a block that is a value of its own."""

    def __init__(self, key: object, what: str, *, expected: str = "", remedy: str = "") -> None:
        super().__init__(what, expected=expected, remedy=remedy)
        self.key = quote(key)


@dataclass(frozen=True, slots=True)
class Kind:
    """What one value may be. Subclasses check it, and describe it to JSON Schema."""

    def check(self, value: Any) -> Any:
        """The value in base units. Raises UnitError or SpecError without a place."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """JSON Schema of what `check` accepts."""
        raise NotImplementedError

    def _validate(self, value: Any) -> Any:
        try:
            return self.check(value)
        except InputError as error:
            kind = "unit" if isinstance(error, UnitError) else "value"
            key = error.key if isinstance(error, _KeyError) else ""
            parts = {"what": error.what, "expected": error.expected, "remedy": error.remedy, "key": key}
            raise PydanticCustomError(kind, "{what}", parts) from None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.schema()


def _as_number(value: Any) -> Any:
    """A number that was written as text, such as YAML 1.1's `2e-5`, as a number; anything else as it is."""
    return plain_scalar(value.strip()) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Count(Kind):
    """A whole number in a range. `1e5` is one too."""

    lowest: int
    highest: int

    def check(self, value: Any) -> int:
        """Raises SpecError."""
        number = _as_number(value)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        expected = f"expected a whole number from {self.lowest} to {self.highest}"
        if isinstance(number, bool) or not isinstance(number, int):
            raise SpecError(f"{shown(value)} is not a whole number", expected=expected)
        if not self.lowest <= number <= self.highest:
            raise SpecError(f"{shown(value)} is out of range", expected=expected)
        return number

    def schema(self) -> dict[str, Any]:
        """An integer in the range."""
        return {"type": "integer", "minimum": self.lowest, "maximum": self.highest}


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A number in a range."""

    lowest: float
    highest: float

    def check(self, value: Any) -> float:
        """Raises SpecError."""
        number = _as_number(value)
        expected = f"expected a number from {self.lowest:g} to {self.highest:g}"
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise SpecError(f"{shown(value)} is not a number", expected=expected)
        if not self.lowest <= number <= self.highest:
            raise SpecError(f"{shown(value)} is out of range", expected=expected)
        return float(number)

    def schema(self) -> dict[str, Any]:
        """A number in the range."""
        return {"type": "number", "minimum": self.lowest, "maximum": self.highest}


@dataclass(frozen=True, slots=True)
class Fraction(Kind):
    """A part of a whole, below one half: `8%` or `0.08`."""

    def check(self, value: Any) -> float:
        """Raises SpecError."""
        percent = isinstance(value, str) and value.strip().endswith("%")
        number = _as_number(value.strip()[:-1] if percent else value)
        expected = "expected a fraction below one half, such as 8% or 0.08"
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise SpecError(f"{shown(value)} is not a fraction", expected=expected)
        fraction = number / 100 if percent else float(number)
        if not 0 <= fraction < 0.5:
            remedy = f"did you mean {quote(value)}%?" if not percent and 1 <= fraction < 50 else ""
            raise SpecError(f"{shown(value)} is out of range", expected=expected, remedy=remedy)
        return fraction

    def schema(self) -> dict[str, Any]:
        """A number, or a percentage as text."""
        percentage = {"type": "string", "pattern": r"^[0-9.]+ *%$"}
        return {"anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 0.5}, percentage]}


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    """true or false."""

    def check(self, value: Any) -> bool:
        """Raises SpecError."""
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        answer = words.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(answer, bool):
            raise SpecError(f"{shown(value)} is not a switch", expected="expected true or false")
        return answer

    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of a few words."""

    words: tuple[str, ...]

    def check(self, value: Any) -> str:
        """Raises SpecError."""
        if isinstance(value, str) and value in self.words:
            return value
        meant = nearest(value, self.words) if isinstance(value, str) else ""
        raise SpecError(
            f"{shown(value)} is not a choice",
            expected=f"expected {', '.join(self.words[:-1])} or {self.words[-1]}",
            remedy=meant,
        )

    def schema(self) -> dict[str, Any]:
        """An enumeration."""
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Text on one line. What it may look like is a pattern with its meaning in words."""

    pattern: str = ""
    meaning: str = "text on one line"
    longest: int = 1024

    def check(self, value: Any) -> str:
        """Raises SpecError."""
        expected = f"expected {self.meaning}"
        if isinstance(value, bool) or value is None:
            remedy = "YAML may read a bare yes, no, on or off as true or false: put it in quotes"
            raise SpecError(f"{quote(value)} is not text", expected=expected, remedy=remedy)
        if isinstance(value, int | float):
            raise SpecError(f"{quote(value)} is a number", expected=expected, remedy="put it in quotes")
        if not isinstance(value, str):
            raise SpecError(f"{quote(value)} is not text", expected=expected)
        # Control characters and line breaks have no place in what becomes a file name or a line of a script.
        if not value.isprintable() or not value.strip():
            raise SpecError(f"{shown(value)} is not usable" if value else "is empty", expected=expected)
        if len(value) > self.longest:
            raise SpecError(f"{len(value)} characters are too many", expected=f"{expected}, at most {self.longest}")
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise SpecError(f"{shown(value)} is not usable", expected=expected)
        return value

    def schema(self) -> dict[str, Any]:
        """A string with its pattern."""
        pattern = {"pattern": f"^(?:{self.pattern})$"} if self.pattern else {}
        return {"type": "string", "minLength": 1, "maxLength": self.longest, **pattern}


@dataclass(frozen=True, slots=True)
class Words(Kind):
    """A list of words, or one text with commas (or, for options, plus signs) between them."""

    pattern: str
    meaning: str

    def check(self, value: Any) -> list[str]:
        """Raises SpecError."""
        items = re.split(r"\s*[,+]\s*", value.strip()) if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not items:
            raise SpecError(f"{shown(value)} is not a list", expected=f"expected a list of {self.meaning}")
        for item in items:
            if not isinstance(item, str) or not re.fullmatch(self.pattern, item):
                raise SpecError(f"{shown(item)} is not usable", expected=f"expected a list of {self.meaning}")
        return list(items)

    def schema(self) -> dict[str, Any]:
        """A list of strings, or a string."""
        return {"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "string"}]}


@dataclass(frozen=True, slots=True)
class Quantity(Kind):
    """A number with its unit, in a range that holds all real hardware with room to spare."""

    parse: Callable[[object], float]
    lowest: float
    highest: float
    range_words: str
    pattern: str
    bare_unit: float | None = None
    """Base units that one stands for where the key itself names the unit (`bf16_tflops: 989`)."""

    def check(self, value: Any) -> float:
        """Raises UnitError."""
        is_bare = isinstance(value, int | float) and not isinstance(value, bool)
        amount = float(value) * self.bare_unit if is_bare and self.bare_unit else self.parse(value)
        if not self.lowest <= amount <= self.highest:
            relation = "above" if amount > self.highest else "below"
            meant = units.probably_meant(str(value), self.parse, self.lowest, self.highest)
            raise UnitError(
                f"{quote(value)} is far {relation} what exists",
                expected=f"expected {self.range_words}",
                remedy=f"did you mean {meant}?" if meant else "",
            )
        return amount

    def schema(self) -> dict[str, Any]:
        """Text with its unit; a number too where the key names the unit."""
        text = {"type": "string", "pattern": self.pattern}
        return {"anyOf": [text, {"type": "number", "exclusiveMinimum": 0}]} if self.bare_unit else text


@dataclass(frozen=True, slots=True)
class PassedThrough(Kind):
    """Keys that go into the trainer's YAML as they are, but for those that topoplan writes itself."""

    def check(self, value: Any) -> dict[str, Any]:
        """Raises SpecError."""
        if not isinstance(value, Mapping):
            raise SpecError(f"{shown(value)} is not a block of keys", expected="expected keys of the trainer's YAML")
        for key, content in value.items():
            if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", key):
                raise _KeyError(key, "is not a key of the trainer")
            if key == "model_name_or_path":
                raise _KeyError(key, "is the spec's `model`", remedy="set `model` instead")
            if own := TRAINER_KEYS_OF_JOB.get(key):
                raise _KeyError(key, f"is the job's `{own}`", remedy=f"set `{own}` in `job` instead")
            if own := TRAINER_KEYS_OF_LAYOUT.get(key):
                raise _KeyError(key, "is part of the layout", remedy=f"hold it with `pin: {{{own}: ...}}` in `job`")
            if content is not None and _is_secret(key):
                raise _KeyError(key, "looks like a secret, and a bundle holds none", remedy="set it on the hosts")
            if isinstance(content, float) and not math.isfinite(content):
                raise _KeyError(key, "is not a finite number")
        return dict(value)

    def schema(self) -> dict[str, Any]:
        """Any keys."""
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class Environment(Kind):
    """Environment variables."""

    def check(self, value: Any) -> dict[str, str]:
        """Raises SpecError."""
        if not isinstance(value, Mapping):
            raise SpecError(f"{shown(value)} is not a block of keys", expected="expected NAME: value, one a line")
        variables: dict[str, str] = {}
        for name, content in value.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name):
                raise _KeyError(name, "is not a variable's name", expected="expected letters, digits and _")
            if _is_secret(name):
                raise _KeyError(name, "looks like a secret, and a bundle holds none", remedy="set it on the hosts")
            if isinstance(content, bool | float) or not isinstance(content, str | int):
                raise _KeyError(name, f"{shown(content)} is not text", remedy="put it in quotes")
            text = str(content)
            if not text.isprintable() or len(text) > 4096:
                raise _KeyError(name, f"{shown(text)} is not usable", expected="expected text on one line")
            variables[name] = text
        return variables

    def schema(self) -> dict[str, Any]:
        """Names with text or integers."""
        value = {"type": ["string", "integer"]}
        return {
            "type": "object",
            "patternProperties": {"^[A-Za-z_][A-Za-z0-9_]*$": value},
            "additionalProperties": False,
        }


def _is_secret(name: str) -> bool:
    """Whether a key is named like a password or an access token. `num_tokens` and `NCCL_IB_PKEY` are not."""
    return bool(re.search(r"(?i)(?:(?:^|_)token$|passw(?:or)?d|secret|api_?key|access_key|credential)", name))


def _rate(lowest: float, highest: float, range_words: str) -> Quantity:
    return Quantity(units.parse_rate, lowest, highest, range_words, units.RATE_PATTERN)


def _amount(lowest: float, highest: float, range_words: str) -> Quantity:
    return Quantity(units.parse_bytes, lowest, highest, range_words, units.AMOUNT_PATTERN)


_SPEED = Quantity(units.parse_flops, 1e12, 1e17, "1TFLOPS to 100PFLOPS", units.FLOPS_PATTERN, bare_unit=1e12)
_LATENCY = Quantity(units.parse_seconds, 1e-7, 0.1, "100ns to 100ms", units.SECONDS_PATTERN)
_PATH = Text(pattern=r"/.*", meaning="an absolute path")
_DEGREE = Count(1, 1_000_000)


# ------------------------------------------------------------------------------------------ forms


class Form(BaseModel):
    """A block of keys. A key without a value (null) counts as left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, protected_namespaces=())
    short_key: ClassVar[str] = ""
    """The key that a bare text in place of the block stands for: `gpu: h100-sxm-80gb`."""

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
    memory: Annotated[int | None, _amount(2**30, 2**43, "1GiB to 8TiB")] = Field(
        default=None,
        description="Memory that the driver reports (nvidia-smi's memory.total), with unit.",
        examples=["81559MiB"],
    )
    memory_bandwidth: Annotated[float | None, _rate(5e10, 2e14, "50GB/s to 200TB/s")] = Field(
        default=None, description="Bandwidth of the device memory, with unit.", examples=["3.35TB/s"]
    )
    bf16_tflops: Annotated[float | None, _SPEED] = Field(
        default=None, description="Dense bf16 peak, in TFLOPS.", examples=[989]
    )
    fp16_tflops: Annotated[float | None, _SPEED] = Field(
        default=None, description="Dense fp16 peak, in TFLOPS; left out: as bf16.", examples=[989]
    )
    fp8_tflops: Annotated[float | None, _SPEED] = Field(
        default=None, description="Dense fp8 peak, in TFLOPS; left out: the card has none.", examples=[1979]
    )
    fp4_tflops: Annotated[float | None, _SPEED] = Field(
        default=None, description="Dense fp4 peak, in TFLOPS; left out: the card has none.", examples=[9000]
    )
    architecture: Annotated[str | None, Choice(("volta", "ampere", "ada", "hopper", "blackwell"))] = Field(
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
    port: Annotated[int | None, Count(1, 65535)] = Field(default=None, description="SSH port; left out: 22.")
    workdir: Annotated[str | None, _PATH] = Field(
        default=None, description="Absolute directory on the host in which the run starts."
    )
    venv: Annotated[str | None, _PATH] = Field(
        default=None, description="Absolute path of the trainer's Python virtual environment on the host."
    )
    socket_interface: Annotated[
        str | None,
        Text(pattern=r"[A-Za-z0-9_][A-Za-z0-9._@:-]*", meaning="a network interface such as eth0", longest=64),
    ] = Field(default=None, description="Network interface of NCCL's and Gloo's sockets.", examples=["eth0"])
    hcas: Annotated[
        list[str] | None, Words(pattern=r"[A-Za-z0-9_][A-Za-z0-9._-]*(:[0-9]+)?", meaning="adapters such as mlx5_0:1")
    ] = Field(default=None, description="InfiniBand or RoCE adapters to use.", examples=[["mlx5_0", "mlx5_1"]])


class FabricForm(Form):
    """The network between the nodes."""

    kind: Annotated[str | None, Choice(("infiniband", "roce", "ethernet"))] = Field(
        default=None, description="infiniband, roce, or ethernet for plain TCP sockets."
    )
    latency: Annotated[float | None, _LATENCY] = Field(
        default=None, description="Time of one small message, NIC to NIC, with unit.", examples=["5us"]
    )
    rails: Annotated[int | None, Count(1, 64)] = Field(
        default=None, description="Leaf planes: NIC i of every node is on plane i modulo rails."
    )
    nodes_per_leaf: Annotated[int | None, Count(1, 10_000)] = Field(
        default=None, description="Nodes on one leaf switch (in one rail)."
    )
    oversubscription: Annotated[float | None, Number(1, 64)] = Field(
        default=None, description="A leaf's downlinks over its uplinks; 1 is non-blocking."
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

    backend: Annotated[str | None, Choice(("mca", "megatron"))] = Field(default=None)
    tp: Annotated[int | None, _DEGREE] = Field(default=None, description="Tensor parallel.")
    pp: Annotated[int | None, _DEGREE] = Field(default=None, description="Pipeline parallel.")
    vpp: Annotated[int | None, _DEGREE] = Field(default=None, description="Virtual pipeline stages per GPU.")
    cp: Annotated[int | None, _DEGREE] = Field(default=None, description="Context parallel.")
    ep: Annotated[int | None, _DEGREE] = Field(default=None, description="Expert parallel.")
    etp: Annotated[int | None, _DEGREE] = Field(default=None, description="Tensor parallel of the experts.")
    dp: Annotated[int | None, _DEGREE] = Field(default=None, description="Data parallel: world / (tp * pp * cp).")
    micro_batch_size: Annotated[int | None, _DEGREE] = Field(default=None)
    gradient_accumulation_steps: Annotated[int | None, _DEGREE] = Field(default=None)
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
    precision_aware_optimizer: Annotated[bool | None, Switch()] = Field(default=None)


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
        default=None, description="Data sets by their names in dataset_info.json, with commas."
    )
    dataset_dir: Annotated[str | None, Text(meaning="a path")] = Field(
        default=None, description="Directory of dataset_info.json, on every node."
    )
    template: Annotated[str | None, Text(pattern=r"[A-Za-z0-9._-]+", meaning="a template's name")] = Field(
        default=None, description="LLaMA-Factory's chat template.", examples=["qwen3_vl"]
    )
    packing: Annotated[bool | None, Switch()] = Field(
        default=None, description="Samples are packed to seq_len, so that every position is a real token."
    )
    samples: Annotated[int | None, Count(1, 10**12)] = Field(
        default=None, description="Sequences in the data set (packed ones with packing); gives hours and GPU-hours."
    )
    epochs: Annotated[float | None, Number(1e-6, 10_000)] = Field(default=None, description="Passes over the data.")
    learning_rate: Annotated[float | None, Number(1e-12, 1)] = Field(default=None, description="Peak learning rate.")
    lora_rank: Annotated[int | None, Count(1, 8192)] = Field(default=None, description="Rank with lora and qlora.")
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
    nodes: Annotated[int | None, Count(1, 10_000)] = Field(default=None, description="Machines.", examples=[4])
    gpus_per_node: Annotated[int | None, Count(1, 144)] = Field(
        default=None, description="GPUs in a machine.", examples=[8]
    )
    gpu: GpuForm = Field(description="A name of `topoplan gpus`, or a block of figures.", examples=["h100-sxm-80gb"])
    nvlink_bandwidth: Annotated[float | None, _rate(1e10, 1e13, "10GB/s to 10TB/s for each GPU")] = Field(
        default=None,
        description=(
            "NVLink of one GPU, both directions together, as vendors quote it, with unit. Left out: the GPUs talk "
            "over PCIe; but with ib_bandwidth and nics_per_node left out too: the usual machine of the GPU."
        ),
        examples=["900GB/s"],
    )
    ib_bandwidth: Annotated[float | None, _rate(1.25e7, 2.5e11, "100Mb/s to 2000Gb/s for each NIC")] = Field(
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
    host_memory: Annotated[int | None, _amount(2**30, 2**50, "1GiB to 1PiB")] = Field(
        default=None, description="Main memory of a machine, with unit.", examples=["2TB"]
    )
    cpu_cores: Annotated[int | None, Count(1, 10_000)] = Field(default=None, description="CPU cores of a machine.")
    pcie_bandwidth: Annotated[float | None, _rate(2.5e8, 1e12, "250MB/s to 1TB/s")] = Field(
        default=None, description="PCIe link of one GPU, each way, with unit.", examples=["64GB/s"]
    )
    env: Annotated[dict[str, str] | None, Environment()] = Field(
        default=None, description="Environment variables for the trainer, passed through."
    )
    margin: Annotated[float | None, Fraction()] = Field(
        default=None, description="Part of the card's memory that a plan must leave free.", examples=["8%"]
    )


_FORM_OF_KEY: Mapping[str, type[Form]] = {
    "gpu": GpuForm,
    "model": ModelForm,
    "job": JobForm,
    "pin": PinForm,
    "recompute": RecomputeForm,
    "hosts": HostForm,
    "fabric": FabricForm,
}


# ------------------------------------------------------------------------------------------ errors


def check_form(data: Mapping[str, Any], place: Callable[[KeyPath], str]) -> SpecForm:
    """The document as a form. Raises SpecError or UnitError, one line for each of the first mistakes."""
    try:
        return SpecForm.model_validate(data)
    except ValidationError as report:
        mistakes = report.errors(include_url=False)
    # A key under a name of someone else's is one mistake: the unknown key, not the missing one too.
    unknown = {mistake["loc"] for mistake in mistakes if mistake["type"] == "extra_forbidden"}
    renamed = {(*path[:-1], likely_key(str(path[-1]), _form_holding(path).model_fields)) for path in unknown}
    mistakes = [mistake for mistake in mistakes if mistake["type"] != "missing" or mistake["loc"] not in renamed]
    messages = [_explain(mistake, place) for mistake in mistakes[:_MAX_MESSAGES]]
    if len(messages) == 1:
        raise messages[0]
    lines = [str(message) for message in messages]
    if len(mistakes) > _MAX_MESSAGES:
        lines.append(f"and {len(mistakes) - _MAX_MESSAGES} more")
    raise SpecError("\n".join(lines))


def likely_key(word: str, known: Iterable[str]) -> str:
    """The known key that a user probably meant: what another tool's word is here, or the nearest spelling."""
    names = list(known)
    if _OTHER_WORDS.get(word) in names:
        return _OTHER_WORDS[word]
    return nearest(word, names).removeprefix("did you mean '").removesuffix("'?")


def dotted(path: KeyPath) -> str:
    """`hosts[0].port`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _form_holding(path: KeyPath) -> type[Form]:
    """The form that has the last key of a path."""
    names = [part for part in path[:-1] if isinstance(part, str)]
    return _FORM_OF_KEY[names[-1]] if names else SpecForm


def _explain(mistake: ErrorDetails, place: Callable[[KeyPath], str]) -> InputError:
    """One of pydantic's errors as ours."""
    path: KeyPath = tuple(mistake["loc"])
    what, expected, remedy = mistake["msg"], "", ""
    error: type[InputError] = SpecError
    match mistake["type"]:
        case "unit" | "value":
            parts = mistake["ctx"]
            path = (*path, parts["key"]) if parts["key"] else path
            what, expected, remedy = parts["what"], parts["expected"], parts["remedy"]
            error = UnitError if mistake["type"] == "unit" else SpecError
        case "extra_forbidden":
            return _unknown_key(path, place(path))
        case "missing":
            form, key = _form_holding(path), str(path[-1])
            examples = form.model_fields[key].examples
            remedy = f"add `{key}: {examples[0]}`" if examples else ""
            block = f" in `{dotted(path[:-1])}`" if path[:-1] else ""
            return SpecError(f"`{key}` is missing{block}", where=place(path[:-1]), remedy=remedy)
        case "model_type" | "model_attributes_type" | "dict_type" | "dict_attributes_type":
            form_of_value = _FORM_OF_KEY.get(next((part for part in reversed(path) if isinstance(part, str)), ""))
            also = "a name or " if form_of_value and form_of_value.short_key else ""
            what, expected = f"{shown(mistake['input'])} is not a block of keys", f"expected {also}`key: value` lines"
        case "list_type":
            what, expected = f"{shown(mistake['input'])} is not a list", "expected one item a line, each behind `- `"
    return error(f"{dotted(path)}: {what}" if path else what, where=place(path), expected=expected, remedy=remedy)


def _unknown_key(path: KeyPath, where: str) -> SpecError:
    key, block = str(path[-1]), dotted(path[:-1])
    form = _form_holding(path)
    inside = f" in `{block}`" if block else ""
    what = f"unknown key {shown(key)}{inside}"
    if likely := likely_key(key, form.model_fields):
        return SpecError(what, where=where, remedy=f"did you mean {likely!r}?")
    word = _OTHER_WORDS.get(key, key)
    if form is not JobForm and word in JobForm.model_fields:
        return SpecError(what, where=where, remedy=f"`{word}` belongs under `job:`")
    if form is not SpecForm and word in SpecForm.model_fields:
        return SpecError(what, where=where, remedy=f"`{word}` belongs at the top of the file")
    if form is not PinForm and word in PinForm.model_fields:
        return SpecError(
            what, where=where, remedy=f"a layout key is held under `pin:` in `job`, as `pin: {{{word}: ...}}`"
        )
    expected = f"expected one of {', '.join(form.model_fields)}"
    remedy = "other keys of the trainer go under `trainer:`" if form is JobForm else ""
    return SpecError(what, where=where, expected=expected, remedy=remedy)
