"""Compare the bytes per logit of megatron-core's cross entropies, by torch's memory profiler, with the cost model."""

import shutil
from types import SimpleNamespace

import pytest

from topoplan.engines.megatron.moments import bytes_per_logit, mtp_bytes_per_logit
from topoplan.layout.layout import Layout, changed

pytestmark = pytest.mark.verify
pytest.importorskip("megatron.core", reason="needs megatron-core (make verify)")
torch = pytest.importorskip("torch")

TOKENS, VOCABULARY = 512, 32_000
LAYOUT = Layout()


@pytest.fixture
def one_rank():
    """Provide a tensor-parallel group of one rank, without processes."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield parallel_state.get_tensor_model_parallel_group()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def peak_bytes_per_logit(loss_of, mtp_layers: int = 0) -> float:
    """Return the peak bytes of the loss, forward and backward, divided by the number of logits of one depth.

    The loss is the end of megatron-core's GPTModel, with a single matrix as output layer.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    def step() -> None:
        hidden = torch.randn(TOKENS * (1 + mtp_layers), 1, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(VOCABULARY, 8, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, VOCABULARY, (1, TOKENS))
        model = SimpleNamespace(
            config=SimpleNamespace(
                mtp_num_layers=mtp_layers or None,
                mtp_loss_scaling_factor=0.1,
                calculate_per_token_loss=False,
                config_logger_dir="",
                use_mup=False,
                mtp_detach_heads=False,
            ),
            training=False,  # otherwise it logs over the data-parallel group
            post_process=True,
            share_embeddings_and_output_weights=False,
            cp_group=None,
            tp_group=None,
            pg_collection=SimpleNamespace(cp=None),  # and _scale_logits, which megatron-core 0.18 needs
            _scale_logits=lambda logits: logits,
            output_layer=lambda hidden_states, **keys: (torch.matmul(hidden_states, weight.t()), None),
            compute_language_model_loss=lambda labels, logits: loss_of(logits, labels.transpose(0, 1).contiguous()),
        )
        ends = dict.fromkeys(("input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
        GPTModel._postprocess(model, hidden, **ends, labels=labels).sum().backward()

    step()  # compiles if a compiler is available
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak / (TOKENS * VOCABULARY)


BF16_BYTES = 2


def freed_before_the_main_loss(mtp_layers: int) -> int:
    """Return the bytes per logit that newer versions of megatron-core free, without a fused cross entropy.

    The loss of multi-token prediction is a separate function there, which frees its last logits when it returns.
    """
    from megatron.core.transformer import multi_token_prediction

    return BF16_BYTES if mtp_layers and hasattr(multi_token_prediction, "process_mtp_loss") else 0


def predicted(layout: Layout, mtp_layers: int) -> int:
    return sum(bytes_per_logit(layout)) + (mtp_bytes_per_logit(layout, mtp_layers)[0] if mtp_layers else 0)


DEPTHS = pytest.mark.parametrize("mtp_layers", [0, 1, 2])


@DEPTHS
def test_the_unfused_cross_entropy(one_rank, mtp_layers):
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    measured = peak_bytes_per_logit(vocab_parallel_cross_entropy, mtp_layers)
    wanted = predicted(LAYOUT, mtp_layers) - freed_before_the_main_loss(mtp_layers)
    assert measured == pytest.approx(wanted, rel=0.02)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@DEPTHS
def test_the_native_fused_cross_entropy(one_rank, mtp_layers):
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    measured = peak_bytes_per_logit(
        lambda logits, labels: fused_vocab_parallel_cross_entropy(logits, labels, one_rank), mtp_layers
    )
    native = changed(LAYOUT, cross_entropy_fusion=True, cross_entropy_fusion_impl="native")
    assert measured == pytest.approx(predicted(native, mtp_layers), rel=0.02)
