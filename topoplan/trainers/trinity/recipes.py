"""Which recipe of the trainer a model, context length and number of GPUs needs: the first one that fits."""

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
from topoplan.trainers.trinity.document import yarn_factor
from topoplan.trainers.trinity.refusals import model_refusals
from topoplan.trainers.trinity.traits import TRINITY, TRINITY_FSDP1

NONE_FITS = "-"
VANILLA = "vanilla"
_STEP = 4096
"""Step between context lengths, in tokens."""
SEQUENCES_PER_MICROBATCH = 2
"""Sequences of maximum length that fit into a micro-batch. Trinity-RFT `common/config.py`: max_token_len_per_gpu
defaults to 2 * max_model_len / Ulysses degree, and `common/verl_config.py` raises a lower value to that."""
_MICRO_BATCHES = 2
"""Minimum micro-batches per batch: gradients already exist when the second one's loss is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRange:
    """Context lengths from a starting point, in the steps of the guide."""

    first: int
    last: int | None = None
    """The longest length; None to continue until nothing fits."""

    def values(self, models: Sequence[Model]) -> Iterator[int]:
        """Yield lengths in steps of 4,096, and beyond the models' (shortest) own context in steps of a quarter of it.

        Source: Trinity-RFT `scripts/context_length_test/search_context_length_capacity.py`.
        """
        native = min((model.max_position_embeddings for model in models if model.max_position_embeddings), default=0)
        context = self.first
        while self.last is None or context <= self.last:
            yield context
            context += _STEP if context < native or not native else max(_STEP, native // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The result for one model, context length and number of GPUs."""

    gpus: int
    max_model_len: int
    """Tokens of prompt and response."""
    model: Model
    layout: Layout | None
    """The first recipe that fits; None if none does."""
    memory: Memory
    """Memory of that recipe; if none fits, of the one that exceeds the card by the least."""

    @property
    def recipe(self) -> str:
        """`vanilla`, `Env`, `Env + SP=2`, ..., or `-`."""
        return NONE_FITS if self.layout is None else recipe(self.layout)

    @property
    def yarn_factor(self) -> float | None:
        """Factor of YaRN's rope scaling that the context needs; None within the model's own context."""
        return yarn_factor(self.model, self.max_model_len)


def recipe(layout: Layout) -> str:
    """Return the name of a recipe."""
    words = ["Env"] * layout.expandable_segments + ["Offload"] * layout.offload
    if layout.ulysses > 1:
        words.append(f"SP={layout.ulysses}")
    return " + ".join(words) or VANILLA


def recipes(model: Model, cluster: Cluster, gpus: int) -> Iterator[Layout]:
    """Yield recipes in the order in which they are tried.

    The environment variable costs nothing, sequence parallelism costs communication, and offload costs the most: it
    comes last, and always with the variable. Gradient checkpointing is on in all recipes.
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
    """Return the memory of a recipe: FSDP 1, the trainer's default, except for offload, which needs FSDP 2's policy.

    The whole card may be used except for the driver's share.
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
    """Return as many of a card's usual machines as are needed for `gpus` GPUs."""
    machines = known.machines(gpu, -(-gpus // gpu.gpus_per_node), gpu.gpus_per_node, gpu.name)
    return replace(machines, nvlink_domain_gpus=gpu.nvlink_domain_gpus)


def cell(model: Model, cluster: Cluster, gpus: int, max_model_len: int) -> Cell:
    """Return the first recipe that fits."""
    tried: list[Memory] = []
    for layout in recipes(model, cluster, gpus):
        memory = memory_of(model, cluster, max_model_len, layout)
        if memory.fits:
            return Cell(gpus=gpus, max_model_len=max_model_len, model=model, layout=layout, memory=memory)
        tried.append(memory)
    nearest = min(tried, key=lambda memory: memory.device_bytes)
    return Cell(gpus=gpus, max_model_len=max_model_len, model=model, layout=None, memory=nearest)


def table(models: Sequence[Model], gpu: Gpu, gpus: Sequence[int], contexts: Sequence[int] | OpenRange) -> list[Cell]:
    """Return all cells, ordered by GPUs, contexts, models.

    An open range of contexts continues, for each number of GPUs, to the first length at which nothing fits.

    Raises LayoutError for a card that the trainer's attention does not support, ModelError for a model that no job is
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
