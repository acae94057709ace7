"""Which recipe of the trainer lets a model, a context and a number of GPUs go together: the first one that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from topoplan.engines.data_parallel.memory import sharded_memory
from topoplan.engines.data_parallel.rules import ulysses_degrees
from topoplan.engines.prediction import Memory
from topoplan.errors import LayoutError
from topoplan.layout.layout import FULL, Layout
from topoplan.specs import known
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu import Gpu
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.trainers.refusal import refuse
from topoplan.trainers.trinity.refusals import model_refusals
from topoplan.trainers.trinity.support import yarn_factor
from topoplan.trainers.trinity.traits import TRINITY, TRINITY_FSDP1

NONE_FITS = "-"
VANILLA = "vanilla"
_STEP = 4096
"""Tokens."""
SEQUENCES_PER_MICROBATCH = 2
"""Longest sequences that a micro batch has room for; Trinity-RFT `common/config.py`: max_token_len_per_gpu is twice
max_model_len over the Ulysses degree where it is not set, and `common/verl_config.py` raises it to that where it is
less."""
_MICRO_BATCHES = 2
"""Of a batch, at least: gradients are there when the second one's loss is worked out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRange:
    """Contexts from one on, in the guide's steps."""

    first: int
    last: int | None = None
    """The longest; None goes on until nothing fits."""

    def values(self, models: Sequence[Model]) -> Iterator[int]:
        """4,096 more each time, and from the models' own context (the shortest of them) on a quarter of that.

        Source: Trinity-RFT `scripts/context_length_test/search_context_length_capacity.py`.
        """
        native = min((model.max_position_embeddings for model in models if model.max_position_embeddings), default=0)
        context = self.first
        while self.last is None or context <= self.last:
            yield context
            context += _STEP if context < native or not native else max(_STEP, native // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What to do for one model, context and number of GPUs."""

    gpus: int
    max_model_len: int
    """Tokens, prompt and response."""
    model: Model
    layout: Layout | None
    """The first recipe that fits; None where none does."""
    memory: Memory
    """Of that recipe; where none fits, of the one that is over the card by least."""

    @property
    def recipe(self) -> str:
        """`vanilla`, `Env`, `Env + SP=2`, ..., or `-`."""
        return NONE_FITS if self.layout is None else recipe(self.layout)

    @property
    def yarn_factor(self) -> float | None:
        """Factor of YaRN's rope scaling that the context needs; None within the model's own."""
        return yarn_factor(self.model, self.max_model_len)


def recipe(layout: Layout) -> str:
    """The name of a recipe."""
    words = ["Env"] * layout.expandable_segments + ["Offload"] * layout.offload
    if layout.ulysses > 1:
        words.append(f"SP={layout.ulysses}")
    return " + ".join(words) or VANILLA


def recipes(model: Model, cluster: Cluster, gpus: int) -> Iterator[Layout]:
    """Recipes in the order in which they are tried.

    The environment variable costs nothing, sequence parallelism communication, and offload most: it comes last, and
    never without the variable. Layers are checkpointed in all of them.
    """
    degrees = ulysses_degrees(model, gpus, cluster.gpus_per_node)
    kinds = [(degree, expandable, False) for degree in degrees for expandable in (False, True)]
    kinds += [(degree, True, True) for degree in degrees]
    for degree, expandable, offload in kinds:
        yield Layout.of(
            backend="fsdp2",
            dp=gpus // degree,
            ulysses=degree,
            micro_batch_size=SEQUENCES_PER_MICROBATCH,
            gradient_accumulation_steps=_MICRO_BATCHES,
            recompute=FULL,
            distributed_optimizer=False,
            expandable_segments=expandable,
            offload=offload,
        )


def memory_of(model: Model, cluster: Cluster, max_model_len: int, layout: Layout) -> Memory:
    """Memory of a recipe: FSDP 1, the trainer's default, but for offload, whose policy is FSDP 2's.

    All of the card may be used but what the driver keeps.
    """
    profile = profile_of(cluster.gpu)
    case = Case(
        model=model,
        cluster=replace(cluster, margin=profile.driver_bytes / cluster.gpu.memory_bytes),
        job=Job(seq_len=max_model_len, global_batch_size=layout.dp * layout.micro_batch_size * _MICRO_BATCHES),
        profile=profile,
        traits=TRINITY if layout.offload else TRINITY_FSDP1,
    )
    return sharded_memory(case, layout, all_stages=True)


def usual_machine(gpu: Gpu, gpus: int) -> Cluster:
    """As many of a card's usual machines as hold `gpus` GPUs."""
    machines = known.machines(gpu, -(-gpus // gpu.gpus_per_node), gpu.gpus_per_node, gpu.name)
    return replace(machines, nvlink_domain_gpus=gpu.nvlink_domain_gpus)


def cell(model: Model, cluster: Cluster, gpus: int, max_model_len: int) -> Cell:
    """The first recipe that fits."""
    tried: list[Memory] = []
    for layout in recipes(model, cluster, gpus):
        memory = memory_of(model, cluster, max_model_len, layout)
        if memory.fits:
            return Cell(gpus=gpus, max_model_len=max_model_len, model=model, layout=layout, memory=memory)
        tried.append(memory)
    nearest = min(tried, key=lambda memory: memory.device_bytes)
    return Cell(gpus=gpus, max_model_len=max_model_len, model=model, layout=None, memory=nearest)


def table(models: Sequence[Model], gpu: Gpu, gpus: Sequence[int], contexts: Sequence[int] | OpenRange) -> list[Cell]:
    """Every cell, in the order GPUs, contexts, models.

    Contexts without an end go on, for each number of GPUs, up to the first at which nothing fits.

    Raises LayoutError for a card that the trainer's attention does not run on, ModelError for a model that no job is
    written for.
    """
    for model in models:
        refuse(model_refusals(model, "--model"))
    if not profile_of(gpu).flash_attention:
        raise LayoutError(
            f"the trainer computes attention with FlashAttention 2, which does not run on {gpu.name}",
            where="--gpu",
            expected="expected a card of the Ampere generation or later",
        )
    cells: list[Cell] = []
    for number in gpus:
        machine = usual_machine(gpu, number)
        for context in contexts if isinstance(contexts, Sequence) else contexts.values(models):
            row = [cell(model, machine, number, context) for model in models]
            cells += row
            if isinstance(contexts, OpenRange) and all(one.layout is None for one in row):
                break
    return cells
