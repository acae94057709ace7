"""Compare the legality of layouts with what the real megatron-core accepts.

No processes are needed: a fake process group stands for all ranks, and models are built on the meta device.
"""

import importlib.metadata
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.version import Version

from tests.layout.specs import DENSE, LINEAR, MLA, MOE, make_layout, make_spec
from tests.verify.megatron import config_of, fake_world, initialize, refused_by_megatron
from topoplan.engines.megatron.rules import RULES
from topoplan.layout.layout import Layout, Recompute, changed
from topoplan.layout.stages import balanced_pipeline_layout
from topoplan.specs.model import Attention, Layer, LinearAttention, Mlp, Model, Moe
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

REASON = "megatron-core is not installed (the verify extra has it)"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("megatron.core.parallel_state", reason=REASON)

pytestmark = pytest.mark.verify

IS_0_18 = Version(importlib.metadata.version("megatron-core")) >= Version("0.18")

STRICTER = {
    "tp-in-nvlink-domain": "a choice of speed",
    "ep-in-nvlink-domain": "a choice of speed",
    "expert-tensor": "trains, and lets the copies of the experts drift apart, before megatron-core 0.19",
    "kv-heads": "the width of the QKV matrix is divided when layers are built; an output gate breaks in forward",
    "widths": "divided when layers are built",
    "expert-widths": "divided when layers are built",
    "expert-adapters": "mcore_bridge",
    "fp8-widths": "Transformer Engine finds out in forward",
    "vocabulary": "the embedding divides it when it is built; Megatron-LM's own loop pads it before",
    "context-parallel": "images and Volta are of the trainer; Megatron's configuration looks at linear attention alone,"
    " and takes it from 0.18 on; it is planned without",
    "experts": "ep that does not divide is found when layers are built; etp without experts is ignored",
    "vision-first-stage": "the adapter's model",
    "batch": "the trainer",
    "interleaving": "the schedule",
    "sequence-length": "the trainer",
    "sequence-parallel": "a mixture of experts without it fails in forward",
    "overlap": "the trainer",
    "adapter": "the trainer",
    "optimizer": "the optimizer's configuration",
    "recompute": "mxfp8, Volta and deepstack inputs are of the adapter",
}
"""Rules, or parts of rules, that megatron-core's configuration and process groups do not check -> their source."""


def takes_linear_attention(spec: Spec, layout: Layout) -> bool:
    """Whether Megatron distributes linear attention over context-parallel ranks."""
    found = next(layer.attention for layer in spec.model.layers if isinstance(layer.attention, LinearAttention))
    shares = layout.tp * layout.cp
    return IS_0_18 and found.key_heads % shares == 0 and found.value_heads % shares == 0


def known_to_megatron(name: str, equation: str, spec: Spec, layout: Layout) -> bool:
    """Whether process groups and TransformerConfig check this equation."""
    if name in ("world-size", "heads", "expert-grid", "pipeline-split"):
        return True
    beginnings = {
        "kv-heads": "KV heads",
        "context-parallel": ("cp ", "linear attention layers"),
        "sequence-parallel": "sequence_parallel with tp 1",
        "recompute": ("recompute mla_up_proj", "recompute moe_act on", "no module"),
    }
    if name == "context-parallel":
        return equation.endswith("with linear attention layers") and not takes_linear_attention(spec, layout)
    if name == "experts":
        return "without experts" in equation and not equation.startswith("ep 1,")
    return name in beginnings and equation.startswith(beginnings[name])


def broken_here(spec: Spec, layout: Layout) -> dict[str, str]:
    """Return all broken rules, not only the first."""
    found = {}
    for rule in RULES:
        if equation := rule.failed(case_of(spec, layout.backend), layout):
            found[rule.name] = equation
    return found


RECOMPUTES = (
    *(Recompute(),) * 6,
    Recompute(granularity="full", method="uniform", num_layers=1),
    Recompute(granularity="full", method="block", num_layers=3),
    Recompute(granularity="selective", modules=("core_attn", "mlp")),
    Recompute(granularity="selective", modules=("moe_act",)),
    Recompute(granularity="selective", modules=("mla_up_proj", "layernorm")),
    Recompute(granularity="selective", modules=("attention",)),
)


def sampled(model: str, count: int) -> Iterator[tuple[Spec, Layout]]:
    """Return layouts of which about half are legal."""
    rng = random.Random(f"{model} 3")
    for _ in range(count):
        tp, pp, cp = (
            rng.choice([1, 2, 2, 4, 4, 8, 8, 3, 16, 32]),
            rng.choice([1, 1, 2, 4, 3, 6, 8]),
            rng.choice([1, 1, 2, 3]),
        )
        if model == LINEAR and rng.random() < 0.7:
            cp = 1
        dp = rng.choice([1, 2, 4, 8])
        world = tp * pp * cp * dp if rng.random() < 0.85 else rng.choice([8, 12, 24, 32, 64])
        if world > 512:
            continue
        moe = model not in (DENSE,)
        layers = make_spec(model).model.num_layers
        vpp = rng.choice([1, 1, 1, 2, 3]) if pp > 1 or rng.random() < 0.1 else 1
        text = None
        if pp > 1 and (layers % (pp * vpp) or rng.random() < 0.1) and rng.random() < 0.8:
            wrong = rng.random() < 0.2
            text = balanced_pipeline_layout(layers - wrong, pp, vpp)
        spec = make_spec(model, nodes=1, gpus_per_node=world, global_batch_size=world * 12)
        yield (
            spec,
            make_layout(
                spec,
                tp=tp,
                pp=pp,
                cp=cp,
                vpp=vpp,
                ep=rng.choice([1, 2, 4, 8, 3]) if moe else rng.choice([1] * 9 + [2]),
                etp=rng.choice([1, 1, tp]) if moe else 1,
                pipeline_layout=text,
                sequence_parallel=tp > 1 if rng.random() < 0.9 else tp == 1,
                recompute=rng.choice(RECOMPUTES),
            ),
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [DENSE, MOE, MLA, LINEAR])
def test_legality_is_that_of_megatron_where_megatron_looks(model: str) -> None:
    counts: Counter[bool] = Counter()
    told: Counter[str] = Counter()
    for spec, layout in sampled(model, 400):
        refused = refused_by_megatron(spec, layout)
        ours = broken_here(spec, layout)
        shared = {name: equation for name, equation in ours.items() if known_to_megatron(name, equation, spec, layout)}
        assert bool(shared) == bool(refused), f"{layout}\nmegatron-core: {refused}\nhere: {ours}"
        assert set(ours) - set(shared) <= set(STRICTER)
        counts[refused is None] += 1
        told.update(shared.keys())
    assert min(counts[True], counts[False]) > 60
    assert len(told) >= 5


def small_model(rng: random.Random) -> Model:
    """Return a model with a few odd sizes, so that each of them sometimes fails to divide."""
    heads = rng.choice([4, 8, 12, 6])
    attention = Attention(
        heads=heads,
        kv_heads=rng.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
        head_dim=rng.choice([8, 9, 12]),
    )
    ffn: Mlp | Moe = Mlp(intermediate_size=rng.choice([48, 50, 66]))
    if rng.random() < 0.5:
        ffn = Moe(
            experts=rng.choice([4, 6, 8]),
            experts_per_token=2,
            intermediate_size=rng.choice([24, 25, 27]),
            shared_intermediate_size=rng.choice([0, 24, 27]),
        )
    return Model(
        name="small",
        model_type="qwen3",
        hidden_size=48,
        vocab_size=rng.choice([96, 100, 98]),
        layers=(Layer(attention=attention, ffn=ffn),) * 4,
        tie_word_embeddings=False,
    )


def refused_when_built(spec: Spec, layout: Layout) -> str | None:
    """Return megatron-core's error when it builds the first stage; None if there is none."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    moe = next((layer.ffn for layer in spec.model.layers if isinstance(layer.ffn, Moe)), None)
    with fake_world(spec.cluster.world_size):
        try:
            initialize(layout, experts=moe is not None)
            config = config_of(spec.model, layout)
            config.moe_grouped_gemm = False  # the grouped kernels need a GPU
            block = (
                get_gpt_decoder_block_spec(config, use_transformer_engine=False)
                if moe
                else get_gpt_layer_local_spec(normalization="RMSNorm")
            )
            with torch.device("meta"):
                GPTModel(
                    config=config,
                    transformer_layer_spec=block,
                    vocab_size=spec.model.vocab_size,
                    max_sequence_length=64,
                    pre_process=True,
                    post_process=False,
                    position_embedding_type="none",
                )
        except (RuntimeError, ValueError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
    return None


BUILT = ("heads", "kv-heads", "widths", "expert-widths", "vocabulary", "experts", "expert-grid", "world-size")


@pytest.mark.filterwarnings("ignore")
def test_widths_divide_where_layers_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is computed, so that only these two calls would need a GPU.
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    rng = random.Random(11)
    counts: Counter[bool] = Counter()
    told: Counter[str] = Counter()
    for _ in range(500):
        model, tp = small_model(rng), rng.choice([1, 2, 3, 4, 6])
        moe = isinstance(model.layers[0].ffn, Moe)
        ep = rng.choice([1, 2, 3, 4]) if moe else 1
        etp = rng.choice([1, tp]) if moe else 1
        spec = make_spec(model, nodes=1, gpus_per_node=tp * 6)
        layout = make_layout(spec, tp=tp, ep=ep, etp=etp, sequence_parallel=False)
        refused = refused_when_built(spec, layout)
        ours = {name: equation for name, equation in broken_here(spec, layout).items() if name in BUILT}
        assert bool(ours) == bool(refused), f"{model.layers[0]}\n{layout}\nmegatron-core: {refused}\nhere: {ours}"
        counts[refused is None] += 1
        told.update(ours.keys())
    assert min(counts.values()) > 60
    assert set(told) == set(BUILT) - {"world-size"}


class AcceptedError(Exception):
    """Raised where the schedule continues after its checks."""


def refused_by_schedule(schedules: Any, pp: int, micro_batches: int) -> bool:
    class Chunk(torch.nn.Module):
        config = config_of(make_spec().model, Layout.of(pp=pp, vpp=2, dp=1, gradient_accumulation_steps=micro_batches))

    with fake_world(pp):
        initialize(Layout.of(pp=pp, vpp=2, dp=1, gradient_accumulation_steps=micro_batches), experts=False)
        try:
            schedules.forward_backward_pipelining_with_interleaving(
                forward_step_func=None,
                data_iterator=[None, None],
                model=[Chunk(), Chunk()],
                num_microbatches=micro_batches,
                seq_length=64,
                micro_batch_size=1,
            )
        except AcceptedError:
            return False
        except (RuntimeError, ValueError) as error:
            if "micro-batches" not in str(error):
                raise
            return True
    raise AssertionError("the schedule went on without a model")


@pytest.mark.filterwarnings("ignore")
def test_the_interleaved_schedule_refuses_what_the_rule_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules", reason=REASON)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **keys: zeros(*size, **keys))

    def accept(*_: Any, **__: Any) -> None:
        raise AcceptedError

    monkeypatch.setattr(schedules, "get_model_type", accept)
    rule = next(rule for rule in RULES if rule.name == "interleaving")
    for pp in (2, 3, 4, 8):
        for accumulation in (*range(1, 14), 16, 20, 24):
            spec = make_spec(global_batch_size=accumulation)
            layout = make_layout(spec, pp=pp, vpp=2, dp=1, gradient_accumulation_steps=accumulation)
            assert bool(rule.failed(case_of(spec, layout.backend), layout)) == refused_by_schedule(
                schedules, pp, accumulation
            )
            assert rule.failed(case_of(spec, layout.backend), changed(layout, vpp=1)) is None
