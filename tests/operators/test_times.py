"""Kernels: never faster than the card, and slower with more work."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.samples import DENSE, LATENT, MIXED, layout_of, spec_of
from tests.sizes import examples
from topoplan.layout.layout import Recompute
from topoplan.operators.combined import hidden_exchange
from topoplan.operators.core_attention import attended_tokens
from topoplan.operators.machine import Kernel, elementwise_s, gemm_s, peak_flops
from topoplan.operators.op import PARTS
from topoplan.operators.shard import shard_of
from topoplan.operators.times import layer_kernels, layer_time
from topoplan.specs import known
from topoplan.specs.case import case_with
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.model import Attention
from topoplan.specs.traits import Traits
from topoplan.trainers.case import case_of
from topoplan.trainers.traits import FINE_TUNING, MEGATRON

H100 = known.gpu("h100-sxm-80gb")
GPUS = ["v100-sxm-32gb", "a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "rtx4090-24gb"]
EXTENT = st.integers(1, 40_000)


def gemm(rows: float, columns: float, inner: float, *, gpu: str = "h100-sxm-80gb", **kwargs: Any) -> float:
    card = known.gpu(gpu)
    precision = kwargs.pop("precision", "fp16")
    return gemm_s(rows, columns, inner, card, profile_of(card), precision, **kwargs)


@lru_cache
def operators(name: str, index: int = -1, precision: str = "bf16", **form: Any) -> dict[str, Kernel]:
    seq_len, tuning = form.pop("seq_len", 4096), form.pop("finetuning", "full")
    job = {"precision": precision, "seq_len": seq_len, "global_batch_size": 256, "finetuning": tuning}
    spec = spec_of(name, nodes=16, gpu="b200-sxm-180gb", **job)
    case = case_with(spec, MEGATRON)
    found = layer_kernels(case, spec.model.layers[index], shard_of(case, layout_of(spec, **form)))
    assert len({operator.name for operator in found}) == len(found)
    return {operator.name: operator for operator in found}


@settings(max_examples=examples(300), deadline=None)
@given(rows=EXTENT, columns=EXTENT, inner=EXTENT, gpu=st.sampled_from(GPUS))
def test_a_gemm_is_never_quicker_than_its_flops_at_peak_nor_its_bytes_at_bandwidth(
    rows: int, columns: int, inner: int, gpu: str
) -> None:
    card = known.gpu(gpu)
    seconds = gemm(rows, columns, inner, gpu=gpu)
    assert seconds >= 2.0 * rows * columns * inner / card.fp16_flops
    assert seconds >= 2.0 * (rows * inner + inner * columns + rows * columns) / card.memory_bytes_per_s


@settings(max_examples=examples(300), deadline=None)
@given(rows=EXTENT, columns=EXTENT, inner=EXTENT, more=st.integers(1, 5_000), gpu=st.sampled_from(GPUS))
def test_a_gemm_takes_no_less_time_when_any_extent_grows(
    rows: int, columns: int, inner: int, more: int, gpu: str
) -> None:
    base = gemm(rows, columns, inner, gpu=gpu)
    slack = 1.0 - 1e-12
    assert gemm(rows + more, columns, inner, gpu=gpu) >= base * slack
    assert gemm(rows, columns + more, inner, gpu=gpu) >= base * slack
    assert gemm(rows, columns, inner + more, gpu=gpu) >= base * slack


def test_a_large_gemm_comes_near_the_efficiency_of_the_profile() -> None:
    size = 16_384
    flops = 2.0 * size**3
    reached = flops / gemm(size, size, size) / H100.fp16_flops
    assert reached == pytest.approx(profile_of(H100).gemm_efficiency, rel=0.03)


def test_small_gemms_waste_the_card() -> None:
    def rate(size: int) -> float:
        return 2.0 * size**3 / gemm(size, size, size)

    assert rate(256) < 0.1 * rate(8192)


def test_a_grouped_gemm_costs_at_least_as_much_as_one_of_the_same_rows() -> None:
    one = gemm(8192, 1536, 2048)
    grouped = gemm(8192 / 32, 1536, 2048, count=32)
    assert grouped > one


@pytest.mark.parametrize(
    ("gpu", "precision", "field"),
    [
        ("h100-sxm-80gb", "bf16", "bf16_flops"),
        ("h100-sxm-80gb", "fp8", "fp8_flops"),
        ("h100-sxm-80gb", "nvfp4", "fp8_flops"),
        ("b200-sxm-180gb", "mxfp8", "fp8_flops"),
        ("b200-sxm-180gb", "nvfp4", "fp4_flops"),
        ("a100-sxm-80gb", "fp8", "bf16_flops"),
        ("a100-sxm-80gb", "nvfp4", "bf16_flops"),
        ("v100-sxm-32gb", "fp16", "fp16_flops"),
        ("v100-sxm-32gb", "bf16", "bf16_flops"),
    ],
)
def test_a_precision_that_the_card_lacks_falls_back_to_the_next_one_up(gpu: str, precision: str, field: str) -> None:
    card = known.gpu(gpu)
    assert peak_flops(card, precision) == getattr(card, field)


def test_elementwise_kernels_go_by_bytes_and_launches() -> None:
    profile = profile_of(H100)
    rate = H100.memory_bytes_per_s * profile.memory_efficiency
    assert elementwise_s(1e9, H100, profile) == pytest.approx(profile.kernel_launch_s + 1e9 / rate)
    assert elementwise_s(0, H100, profile, kernels=3) == pytest.approx(3 * profile.kernel_launch_s)


def test_attention_grows_with_the_square_of_the_sequence() -> None:
    short = operators(DENSE, seq_len=131_072)["core_attn"]
    long = operators(DENSE, seq_len=524_288)["core_attn"]
    assert long.forward_s / short.forward_s == pytest.approx(16, rel=0.02)
    assert long.backward_s > 2.5 * long.forward_s


def test_flash_attn_is_slower_than_cudnn_from_hopper_on() -> None:
    def attention(gpu: str, **form: Any) -> Kernel:
        spec = spec_of(DENSE, nodes=1, gpu=gpu, seq_len=16384, global_batch_size=64)
        case = replace(case_of(spec, "megatron"), traits=form.pop("traits", MEGATRON))
        kernels = layer_kernels(case, spec.model.layers[0], shard_of(case, layout_of(spec, tp=4, **form)))
        return next(kernel for kernel in kernels if kernel.name == "core_attn")

    cudnn = attention("h100-sxm-80gb")
    asked, usual = {"attention_backend": "flash"}, {"traits": FINE_TUNING}
    for flash in (attention("h100-sxm-80gb", **asked), attention("h100-sxm-80gb", **usual)):
        # 335 of 989 TFLOP/s (arXiv 2307.08691) for 0.589 and 0.497 on the slowest of some cards.
        assert flash.forward_s / cudnn.forward_s == pytest.approx(0.589 * 989.5 / 335, rel=0.03)
        assert flash.backward_s / cudnn.backward_s == pytest.approx(0.497 * 989.5 / 335, rel=0.03)
    assert attention("h100-sxm-80gb", **usual, attention_backend="fused").forward_s == cudnn.forward_s
    assert attention("a100-sxm-80gb", **asked).forward_s == attention("a100-sxm-80gb").forward_s


def test_attention_is_never_quicker_than_its_flops_at_peak() -> None:
    card = known.gpu("b200-sxm-180gb")
    for name, heads, width in ((DENSE, 32, 128), (LATENT, 128, (192 + 128) / 2)):
        flops = 2 * 4096 * (4096 / 2) * heads * 2 * width
        assert operators(name)["core_attn"].forward_s > flops / card.bf16_flops


def test_a_sliding_window_counts_the_tokens_it_leaves() -> None:
    for seq_len, window in ((1000, 100), (1000, 999), (1000, 1000), (512, 4096), (64, 0)):
        seen = [min(position, window) if window else position for position in range(seq_len)]
        assert attended_tokens(seq_len, window) == pytest.approx(sum(seen) / seq_len, abs=0.51)


def test_a_window_makes_attention_cheaper() -> None:
    spec = spec_of(DENSE, gpu="b200-sxm-180gb", seq_len=32768)
    layer = spec.model.layers[0]
    assert isinstance(layer.attention, Attention)
    narrow = replace(layer, attention=replace(layer.attention, window=1024))
    shard = shard_of(case_of(spec, "megatron"), layout_of(spec))
    case = case_of(spec, "megatron")
    times = [next(o for o in layer_kernels(case, one, shard) if o.name == "core_attn") for one in (layer, narrow)]
    assert times[0].forward_s / 16 < times[1].forward_s < times[0].forward_s / 10


def test_tensor_parallel_layers_do_a_tp_th_of_the_work() -> None:
    whole, split = operators(DENSE), operators(DENSE, tp=4)
    for name in ("linear_qkv", "linear_fc1", "linear_fc2"):
        assert whole[name].forward_s / split[name].forward_s == pytest.approx(4, rel=0.25)
    # A quarter of the heads leave the card waiting for the last tiles.
    assert 2 < whole["core_attn"].forward_s / split["core_attn"].forward_s < 4
    assert "attention collectives" not in whole
    assert split["attention collectives"].part == split["mlp collectives"].part == "tp_comm"


def test_sequence_parallelism_moves_as_many_bytes_and_spares_the_norms() -> None:
    with_sp, without = (operators(DENSE, tp=4, sequence_parallel=on, seq_len=65_536) for on in (True, False))
    assert with_sp["input_layernorm"].forward_s < without["input_layernorm"].forward_s
    # An all-gather and a reduce-scatter equal one all-reduce with one more start; backward gathers the input once more.
    assert with_sp["mlp collectives"].forward_s == pytest.approx(without["mlp collectives"].forward_s, rel=0.2)
    assert with_sp["mlp collectives"].backward_s > without["mlp collectives"].backward_s


def test_collectives_in_user_buffers_take_less_and_cost_the_products_something() -> None:
    form = {"tp": 4, "seq_len": 65_536, "backend": "megatron"}
    apart, inside = operators(DENSE, **form), operators(DENSE, tp_comm_overlap=True, **form)
    for name in ("attention collectives", "mlp collectives"):
        assert 0 < inside[name].forward_s < 0.6 * apart[name].forward_s
        assert 0 < inside[name].backward_s < apart[name].backward_s
    # If a product is too short to hide a collective, the rest of the collective stays exposed.
    short = {"tp": 4, "seq_len": 1024, "backend": "megatron"}
    left = [operators(DENSE, tp_comm_overlap=on, **short)["attention collectives"].forward_s for on in (True, False)]
    assert 0.3 * left[1] < left[0]
    # MoE layers have no user buffers; the collectives of the shared expert stay exposed.
    assert operators(LATENT, tp=8, ep=8, etp=1)["shared expert collectives"].forward_s > 0


def test_the_other_pass_hides_what_it_has_work_for() -> None:
    form = {"ep": 8, "etp": 1, "backend": "megatron", "moe_token_dispatcher_type": "alltoall"}
    alone, beside = (dict(operators(LATENT, overlap_moe_expert_parallel_comm=on, **form)) for on in (False, True))
    assert "hidden by the other pass" not in alone
    hidden, exchange = beside.pop("hidden by the other pass"), alone["dispatch, combine (alltoall)"]
    assert beside == alone
    # Attention and experts take longer than what runs beside them, for all but the first of the two micro-batches.
    profile = profile_of(known.gpu("b200-sxm-180gb"))
    share = -hidden.forward_s / exchange.forward_s / profile.expert_overlap
    assert share == pytest.approx(1 - 1 / 2)


def test_no_more_is_hidden_than_there_is_work() -> None:
    attention = Kernel("core_attn", "attention", 0.5, 0.7)
    experts = Kernel("experts.linear_fc1", "gemm", 1.0, 2.0)
    between = Kernel("permute, sort, unpermute", "elementwise", 3.0, 3.0)
    exchange = Kernel("dispatch, combine (alltoall)", "ep_comm", 10.0, 10.0)
    hidden = hidden_exchange((attention, experts, between, exchange), share=1.0, expert_overlap=1.0)
    # Its combine runs beside the other pass's attention, backward in forward; half of the experts are beside each.
    assert (hidden.part, hidden.forward_s, hidden.backward_s) == ("ep_comm", -(1.5 + 0.7), -(1.5 + 0.5))
    assert hidden_exchange((attention, experts, between), share=1.0, expert_overlap=1.0) is None


def test_latent_attention_gathers_its_compressed_states() -> None:
    # DeepSeek-V3: 1536 + 512 + 64 wide, not 7168.
    found = operators(LATENT, 0, tp=8, ep=8, etp=1, seq_len=65_536)  # a dense layer: its MLP gathers all of it
    expected = (2112 / 7168 + 1) / 2
    ratio = found["attention collectives"].forward_s / found["mlp collectives"].forward_s
    assert ratio == pytest.approx(expected, rel=0.1)  # and two starts more


def test_the_ring_of_context_parallelism_hides_behind_attention_when_sequences_are_long() -> None:
    plain = operators(DENSE, seq_len=131_072)
    split = operators(DENSE, cp=4, seq_len=131_072)
    assert "cp ring" not in plain
    assert split["core_attn"].forward_s == pytest.approx(plain["core_attn"].forward_s / 4, rel=0.05)
    assert split["cp ring"].forward_s < 0.05 * split["core_attn"].forward_s


def test_all_to_all_of_context_parallelism_sends_what_attention_takes_in_and_gives_back() -> None:
    found = operators(DENSE, cp=4, seq_len=131_072, cp_comm_type="a2a", backend="megatron")
    assert "cp ring" not in found
    call = found["cp all-to-all"].collective
    assert call.kind == "all-to-all"
    assert call.sent_bytes * call.forward_calls == 2 * 131_072 / 4 * 2 * (32 + 8) * 128


def test_experts_trade_tokens_only_when_they_are_spread() -> None:
    name = "dispatch, combine (alltoall)"
    alone, inside = operators(MIXED), operators(MIXED, ep=8)
    across = operators(MIXED, ep=16, moe_token_dispatcher_type="alltoall")
    assert name not in alone
    assert inside[name].forward_s < across[name].forward_s
    assert inside["experts.linear_fc1"].forward_s == pytest.approx(across["experts.linear_fc1"].forward_s, rel=0.3)


def test_the_second_bias_of_experts_is_added_in_fp32_outside_of_the_product() -> None:
    name, ep8 = "experts.linear_fc2 bias", operators("openai/gpt-oss-120b", tp=1, ep=8)
    launch_s, elements = profile_of(known.gpu("b200-sxm-180gb")).kernel_launch_s, 4096 * 4 * 2880
    bytes_s = elementwise_s(elements, known.gpu("b200-sxm-180gb"), profile_of(known.gpu("b200-sxm-180gb")), kernels=0)
    assert ep8[name].forward_s == pytest.approx(28 * bytes_s + (2 * 16 + 2) * launch_s, rel=0.01)
    assert ep8[name].backward_s == pytest.approx(40 * bytes_s + (5 * 16 + 2) * launch_s, rel=0.01)
    frozen = operators("openai/gpt-oss-120b", tp=1, ep=8, finetuning="lora")[name]
    assert frozen.backward_s == pytest.approx(28 * bytes_s + (3 * 16 + 2) * launch_s, rel=0.01)
    assert name not in operators(MIXED, tp=1, ep=8)


def test_experts_in_eight_bits_are_copied_where_the_router_does_not_pad() -> None:
    def copies(gpu: str, traits: Traits, precision: str = "fp8") -> list[Kernel]:
        spec = spec_of(MIXED, nodes=1, gpu=gpu, seq_len=4096, global_batch_size=64, precision=precision)
        case = replace(case_of(spec, "megatron"), traits=traits)
        kernels = layer_kernels(case, spec.model.layers[0], shard_of(case, layout_of(spec, tp=1, ep=8)))
        return [kernel for kernel in kernels if kernel.name == "experts padded for 8 bits"]

    (hopper,) = copies("h100-sxm-80gb", MEGATRON)
    assert hopper.forward_s == hopper.backward_s
    assert copies("b200-sxm-180gb", FINE_TUNING)
    assert not copies("b200-sxm-180gb", MEGATRON)
    assert not copies("h100-sxm-80gb", FINE_TUNING, "bf16")


def test_flex_permutes_less_and_leaves_no_collectives_of_expert_tensor_parallelism() -> None:
    form = {"ep": 16, "tp": 2, "etp": 2}
    plain = operators(MIXED, moe_token_dispatcher_type="alltoall", **form)
    flex = operators(MIXED, **form)
    assert flex == operators(MIXED, moe_token_dispatcher_type="flex", **form)
    permute = "permute, sort, unpermute"
    assert flex[permute].forward_s < plain[permute].forward_s
    assert set(plain) - set(flex) == {"dispatch, combine (alltoall)", "expert tensor collectives"}
    assert set(flex) - set(plain) == {"dispatch, combine (flex)"}
    call = flex["dispatch, combine (flex)"].collective
    assert call.group.size == 32
    assert flex["dispatch, combine (flex)"].forward_s == 2 * call.call_s


@pytest.mark.parametrize("name", [DENSE, MIXED, LATENT, "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_full_recomputation_repeats_the_whole_forward(name: str) -> None:
    spec = spec_of(name)
    shard = shard_of(case_of(spec, "megatron"), layout_of(spec))
    layer = spec.model.layers[-1]
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    case = case_of(spec, "megatron")
    again = layer_time(case, layer, shard, full)
    plain = layer_time(case, layer, shard, Recompute())
    assert again.recompute_s == pytest.approx(sum(plain.forward_s))
    assert plain.recompute_s == 0
    assert len(plain.forward_s) == len(plain.backward_s) == len(PARTS)
    assert (again.forward_s, again.backward_s) == (plain.forward_s, plain.backward_s)


def test_communication_and_nothing_else_names_a_call_of_its_collective() -> None:
    table = operators(MIXED, tp=2, cp=2, ep=4, etp=2)
    for operator in table.values():
        assert (operator.collective is not None) == operator.part.endswith("_comm")
    sizes = {name: operator.collective.group.size for name, operator in table.items() if operator.collective}
    assert sizes == {
        "attention collectives": 2,
        "cp ring": 2,
        "dispatch, combine (alltoall)": 4,
        "expert tensor collectives": 2,
    }
    call = table["dispatch, combine (alltoall)"].collective
    assert table["dispatch, combine (alltoall)"].forward_s == 2 * call.call_s


@pytest.mark.parametrize(("sequence_parallel", "kind"), [(True, "all-gather"), (False, "all-reduce")])
def test_sequence_parallel_gathers_and_scatters_what_is_else_reduced(sequence_parallel: bool, kind: str) -> None:
    call = operators(DENSE, tp=4, sequence_parallel=sequence_parallel)["mlp collectives"].collective
    assert call.kind == kind
    assert call.sent_bytes == 2 * 4096 * 4096  # bf16, tokens x hidden


def test_a_frozen_product_has_no_gradient_of_its_weight_and_its_adapter_has_both() -> None:
    frozen, trained = operators(DENSE, finetuning="lora"), operators(DENSE)
    for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
        assert frozen[name].forward_s == trained[name].forward_s
        assert frozen[name].backward_s < 0.7 * trained[name].backward_s
        for narrow in (frozen[f"{name}.lora_A"], frozen[f"{name}.lora_B"]):
            assert 0 < narrow.forward_s < frozen[name].forward_s
            assert 0 < narrow.backward_s < frozen[name].backward_s


def test_tensor_parallelism_exchanges_what_is_as_wide_as_the_rank() -> None:
    found = operators(DENSE, tp=4, finetuning="lora")
    for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
        call = found[f"{name} adapter's collectives"].collective
        assert call.kind == "all-gather"
        assert call.sent_bytes == 2 * 4096 * 8
    assert not [name for name in operators(DENSE, finetuning="lora") if "collectives" in name]


def test_a_frozen_pair_gathers_nothing_again_and_hides_nothing() -> None:
    frozen = operators(DENSE, tp=4, finetuning="lora")["attention collectives"]
    assert frozen.forward_s == pytest.approx(frozen.backward_s)
