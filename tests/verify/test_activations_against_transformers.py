"""Compare the activations that layers of transformers save for backward, seen by torch's hooks, with the cost model.

Small models with random weights run on the CPU, where scaled_dot_product_attention saves what FlashAttention saves.
Each storage counts once; parameters and their 16-bit copies do not count.
"""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.engines.samples import spec_of
from tests.verify.test_parameters_against_transformers import (
    REMOTE_CODE,
    hugging_face_config,
    one_name_per_architecture,
)
from topoplan import catalog
from topoplan.operators.activations import eager_activations
from topoplan.operators.eager import FORWARD_LOGIT_BYTES, LOGIT_BYTES, LayerUse
from topoplan.operators.finetuning import elements_of, layer_linears
from topoplan.specs import known
from topoplan.specs.config_json import model_from_config

pytestmark = pytest.mark.verify
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (the verify extra has it)")

TOKENS, VOCABULARY, LAYERS, RANK = 512, 2000, 4, 4
EXPERTS = {"moe_intermediate_size": 384, "num_experts": 8, "num_experts_per_tok": 2}
KINDS = {
    "llama": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 640},
}
LATENT = {
    **{"num_key_value_heads": 8, "head_dim": 16, "q_lora_rank": 96, "kv_lora_rank": 128, "qk_nope_head_dim": 48},
    **{"qk_rope_head_dim": 16, "v_head_dim": 64, "first_k_dense_replace": LAYERS},
}


def config_of(kind, **changes):
    values = {
        **{"hidden_size": 256, "intermediate_size": 768, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096},
        **{"tie_word_embeddings": False, "use_cache": False},
    }
    return transformers.AutoConfig.for_model(kind, **values | changes)


def model_of(config, dtype=None):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    return model.to(dtype or torch.float32)


def with_adapters(model, target, dtype):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=target, task_type="CAUSAL_LM"))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def in_4_bits(model):
    """Pack the linear layers of a model in NF4, as bitsandbytes does when the model is loaded."""
    bnb = pytest.importorskip("bitsandbytes", minversion="0.46")  # packs on the CPU
    for name, module in list(model.named_modules()):
        for child, linear in list(module.named_children()):
            if ".layers." in name and isinstance(linear, torch.nn.Linear):
                packed = bnb.nn.Linear4bit(linear.in_features, linear.out_features, False, torch.bfloat16)
                packed.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, child, packed.to("cpu"))
    model.is_loaded_in_4bit = True
    return model


def kept_by_place(model, *, autocast=False):
    """Return the bytes saved by each layer (by number) and by the end (-1), without parameters and their copies."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    of_weights = shapes | {shape[::-1] for shape in shapes}
    kept, alive, seen, place = Counter(), [], set(), [None]

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own | seen:
            alive.append(tensor)  # otherwise its address might be reused
            seen.add(storage.data_ptr())
            is_copy = autocast and tuple(tensor.shape) in of_weights and tensor.dtype == torch.bfloat16
            kept[place[0]] += 0 if is_copy else storage.nbytes()
        return tensor

    def enter(number):
        return lambda *_: place.__setitem__(0, number)

    for name, module in model.named_modules():
        if found := re.search(r"layers\.(\d+)$", name):
            module.register_forward_pre_hook(enter(int(found[1])))
            module.register_forward_hook(enter(-1 if int(found[1]) == LAYERS - 1 else None))
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    casts = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casts:
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return kept


def predicted(config, place=2, **use):
    model = model_from_config(config.to_dict(), name="tiny", where="tiny")
    layer = model.layers[place]
    if "adapted" in use:
        names = {linear.name for linear in layer_linears(model, layer)}
        use["adapted"] = frozenset(names if use["adapted"] == "all" else names & use["adapted"])
    usual = {"trains_weights": "adapted" not in use, "adapted": frozenset(), "fused": False}
    return eager_activations(model, layer, LayerUse(tokens=TOKENS, seq_len=TOKENS, **usual | use))


EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@EACH_KIND
def test_a_layer_in_16_bits_as_deepspeed_and_fsdp2_run_it(kind):
    config = config_of(kind, **KINDS[kind])
    kept = kept_by_place(model_of(config, torch.bfloat16))
    assert predicted(config).saved_bytes == pytest.approx(kept[2], rel=0.002)


@EACH_KIND
def test_a_layer_with_fp32_weights_under_autocast_as_ddp_runs_it(kind):
    config = config_of(kind, **KINDS[kind])
    kept = kept_by_place(model_of(config), autocast=True)
    assert predicted(config, fp32_weights=True, residual_bytes=4).saved_bytes == pytest.approx(kept[2], rel=0.002)


def test_a_trained_layer_behind_frozen_ones_in_16_bits_has_a_residual_in_16_bits():
    config = config_of("qwen3")
    model = model_of(config, torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained := ".layers.2." in name or ".layers.3." in name)
        if trained:
            parameter.data = parameter.data.float()
    kept = kept_by_place(model, autocast=True)
    assert predicted(config, place=3, fp32_weights=True).saved_bytes == pytest.approx(kept[3], rel=0.002)
    assert kept[0] < 0.01 * kept[3]  # cosines and sines of the positions, shared by all layers


ADAPTED = pytest.mark.parametrize("names", ["all", frozenset({"q_proj", "v_proj"})], ids=["all", "q_proj,v_proj"])


@EACH_KIND
@ADAPTED
@pytest.mark.parametrize(
    ("dtype", "autocast", "copied_bytes"),
    [("float32", True, 2), ("float32", False, 4), ("bfloat16", False, 0)],
    ids=["fp32 under autocast", "fp32 without autocast", "16 bits"],
)
def test_a_frozen_layer_with_adapters(kind, names, dtype, autocast, copied_bytes):
    config = config_of(kind, **KINDS[kind])
    target = "all-linear" if names == "all" else sorted(names)
    model = with_adapters(model_of(config, torch.bfloat16), target, getattr(torch, dtype))
    kept = kept_by_place(model, autocast=autocast)
    found = predicted(config, adapted=names, adapter_input_bytes=copied_bytes).saved_bytes
    # Tensors as narrow as a rank, in fp32 at most, are ignored.
    narrow = 4 * RANK * TOKENS * 9
    assert kept[2] - narrow <= found <= kept[2] * 1.002


@pytest.mark.parametrize(("autocast", "copied_bytes"), [(True, 2), (False, 4)], ids=["autocast", "no autocast"])
def test_a_packed_layer_saves_no_inputs_but_those_of_its_adapters(autocast, copied_bytes):
    config, names = config_of("llama"), frozenset({"q_proj", "v_proj"})
    model = with_adapters(in_4_bits(model_of(config, torch.bfloat16)), sorted(names), torch.float32)
    kept = kept_by_place(model, autocast=autocast)
    use = {"adapter_input_bytes": copied_bytes, "packed_bytes": 0.5, "saves_packed_inputs": False}
    found = predicted(config, adapted=names, **use).saved_bytes
    assert kept[2] - 4 * RANK * TOKENS * 2 <= found <= kept[2] * 1.002


def test_a_layer_with_latent_attention():
    config = config_of("deepseek_v3", **LATENT)
    kept = kept_by_place(model_of(config, torch.bfloat16))
    # On the CPU the output is stored head by head, so that o_proj saves a reordered copy.
    copy = 2 * TOKENS * LATENT["num_key_value_heads"] * LATENT["v_head_dim"]
    assert predicted(config).saved_bytes + copy == pytest.approx(kept[2], rel=0.002)


@pytest.mark.parametrize(("dtype", "residual_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_with_gradient_checkpointing_a_layer_keeps_its_input_alone(dtype, residual_bytes):
    config = config_of("qwen3")
    model = model_of(config, getattr(torch, dtype))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    kept = kept_by_place(model, autocast=dtype == "float32")
    # Saved by the call around a layer; that of the last layer counts as the end. The embedding saves the token ids.
    token_numbers = 8 * TOKENS
    assert kept[None] == (LAYERS - 1) * predicted(config, residual_bytes=residual_bytes).input_bytes + token_numbers
    assert all(kept[place] == 0 for place in range(LAYERS))


@pytest.mark.parametrize(("backward", "expected"), [(False, FORWARD_LOGIT_BYTES), (True, LOGIT_BYTES)])
def test_peak_bytes_of_a_logit(backward, expected):
    hidden, vocabulary = 8, 32_000

    def step():
        states = torch.randn(1, TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, vocabulary, (1, TOKENS))
        from transformers.loss.loss_utils import ForCausalLMLoss

        logits = states @ weight.t()
        loss = ForCausalLMLoss(logits, labels, vocab_size=vocabulary)
        del logits  # because the trainer drops the model's outputs
        if backward:
            loss.backward()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    held = peak = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += change
        peak = max(peak, held)
    assert peak / (TOKENS * vocabulary) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast_gives_its_copies_of_weights_up_at_the_end_of_forward_unless_products_keep_them(checkpointing):
    config = config_of("llama", hidden_size=512, intermediate_size=1536)
    model, ids = model_of(config), torch.randint(0, VOCABULARY, (1, 16))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, profile_memory=True) as profiler,
        torch.autocast("cpu", torch.bfloat16),
    ):
        loss = model(input_ids=ids, labels=ids).loss
    events = profiler.profiler.kineto_results.events()
    held = [0]
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held.append(held[-1] + change)
    assert loss.requires_grad
    # All weights except the embedding, which is looked up instead of multiplied.
    copies = 2 * (sum(parameter.numel() for parameter in model.parameters()) - VOCABULARY * 512)
    head = 2 * VOCABULARY * 512
    assert max(held) == pytest.approx(copies, rel=0.15)
    assert held[-1] == pytest.approx(head if checkpointing else copies, rel=0.25)


def test_peft_makes_adapters_fp32_on_a_model_in_16_bits():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model_of(config_of("qwen3"), torch.bfloat16), config)
    types = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("target", ["all", "q_proj,v_proj"])
def test_parameters_of_adapters(kind, target):
    latent = kind.startswith("deepseek")
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1}
    extra = {**LATENT, **experts, "topk_group": 1, "first_k_dense_replace": 1} if latent else KINDS[kind]
    if latent and target != "all":
        target = "q_b_proj,o_proj"
    config = config_of(kind, **extra)
    model = with_adapters(model_of(config), "all-linear" if target == "all" else target.split(","), torch.float32)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    job = replace(spec_of().job, finetuning="lora", lora_rank=RANK, lora_target=tuple(target.split(",")))
    elements = elements_of(model_from_config(config.to_dict(), name="tiny", where="tiny"), job)
    assert elements.trained == elements.adapters == trained
    assert elements.frozen == sum(parameter.numel() for parameter in model.parameters()) - trained


@pytest.mark.parametrize("name", one_name_per_architecture())
def test_linear_layers_of_the_catalog_have_the_names_and_shapes_of_transformers(name):
    values = catalog.model_config(name)
    published_type = values.pop("model_type")
    model_type = REMOTE_CODE.get(published_type, published_type)
    if model_type is None:
        pytest.skip(f"transformers has no class for model_type {published_type}")
    config = hugging_face_config(model_type, values)
    multimodal = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        whole = auto.from_config(config)
    model = known.model(name)
    found = [Counter() for _ in model.layers]
    for path, module in whole.named_modules():
        place = re.search(r"\blayers\.(\d+)\.", path)
        if place and isinstance(module, torch.nn.Linear) and "visual" not in path:
            found[int(place[1])][path.rsplit(".", 1)[-1], module.in_features, module.out_features] += 1
    for layer, real in zip(model.layers, found, strict=True):
        assert Counter((one.name, one.inputs, one.outputs) for one in layer_linears(model, layer)) == real
