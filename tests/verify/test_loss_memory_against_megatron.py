"""Bytes a logit of megatron-core's cross entropies, by torch's own memory profiler, equal the cost model's."""

import shutil
from dataclasses import replace

import pytest

from topoplan.cost.memory import bytes_per_logit
from topoplan.layout.layout import Layout

pytestmark = pytest.mark.verify
pytest.importorskip("megatron.core", reason="needs megatron-core (make verify)")
torch = pytest.importorskip("torch")

TOKENS, VOCABULARY = 512, 32_000
LAYOUT = Layout(dp=1, gradient_accumulation_steps=1)


@pytest.fixture
def one_rank():
    """A tensor-parallel group of one rank, without processes."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield parallel_state.get_tensor_model_parallel_group()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def peak_bytes_per_logit(loss_of) -> float:
    """Peak of the loss, forward and backward, over the number of logits; the caller lets go of the logits."""

    def step() -> None:
        hidden = torch.randn(TOKENS, 1, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(VOCABULARY, 8, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, VOCABULARY, (TOKENS, 1))
        loss_of(torch.matmul(hidden, weight.t()), labels).sum().backward()

    step()  # compiles, where there is something to compile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak / (TOKENS * VOCABULARY)


def test_the_unfused_cross_entropy(one_rank):
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    measured = peak_bytes_per_logit(vocab_parallel_cross_entropy)
    assert measured == pytest.approx(bytes_per_logit(LAYOUT), rel=0.02)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_the_native_fused_cross_entropy(one_rank):
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    measured = peak_bytes_per_logit(lambda logits, labels: fused_vocab_parallel_cross_entropy(logits, labels, one_rank))
    native = replace(LAYOUT, cross_entropy_fusion=True, cross_entropy_fusion_impl="native")
    assert measured == pytest.approx(bytes_per_logit(native), rel=0.02)
