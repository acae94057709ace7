"""Layouts of ddp, deepspeed and fsdp2, and a small model whose figures are worked out by hand."""

from typing import Any

from tests.engines.samples import spec_of
from topoplan.engines.data_parallel.memory import sharded_memory
from topoplan.engines.data_parallel.states import ShardedStates, sharded_states
from topoplan.engines.data_parallel.step import sharded_time
from topoplan.engines.prediction import Memory, Time
from topoplan.layout.forms import layout_from_dict
from topoplan.layout.layout import Layout
from topoplan.specs.model import Attention, Layer, Mlp, Model
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY, LAYERS = 64, 4, 2, 16, 160, 1000, 3
TINY_LAYER = Layer(
    attention=Attention(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM), ffn=Mlp(intermediate_size=WIDTH)
)
TINY = Model(
    name="tiny",
    model_type="llama",
    hidden_size=HIDDEN,
    vocab_size=VOCABULARY,
    layers=(TINY_LAYER,) * LAYERS,
    tie_word_embeddings=False,
)
# q and o, k and v, gate, up and down, two norms.
TINY_LAYER_ELEMENTS = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64
TINY_ELEMENTS = LAYERS * TINY_LAYER_ELEMENTS + 2 * VOCABULARY * HIDDEN + HIDDEN


def sharded(spec: Spec, backend: str, **form: Any) -> Layout:
    """Return a layout of a data-parallel backend, completed as for `topoplan predict`."""
    return layout_from_dict({"backend": backend} | form, spec.cluster, spec.model, spec.job)


def states_of(spec: Spec, backend: str, **form: Any) -> ShardedStates:
    """Return the states of one GPU."""
    case = case_of(spec, "megatron")
    return sharded_states(case, sharded(spec, backend, **form))


def memory_of(spec: Spec, backend: str, **form: Any) -> Memory:
    """Return the memory of one GPU, with its peak candidates."""
    layout = sharded(spec, backend, **form)
    case = case_of(spec, layout.backend)
    return sharded_memory(case, layout, all_stages=True)


def time_of(spec: Spec, backend: str, **form: Any) -> Time:
    """Return the time of a step."""
    layout = sharded(spec, backend, **form)
    case = case_of(spec, layout.backend)
    return sharded_time(case, layout)


def small_spec(**keys: Any) -> Spec:
    """Return a spec of one node of eight GPUs with Qwen3-4B."""
    return spec_of("Qwen/Qwen3-4B", **{"nodes": 1} | keys)
