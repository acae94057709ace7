"""What `spec_to_dict` writes is read back: every field of every class, with its type, and nothing else is accepted."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan import catalog
from topoplan.errors import SpecError
from topoplan.planner.inputs import spec_from_dict
from topoplan.planner.view import spec_to_dict
from topoplan.specs import known
from topoplan.specs.cluster import Cluster, Fabric, Host
from topoplan.specs.job import Job
from topoplan.specs.json_source import parse_json
from topoplan.specs.lengths import Lengths
from topoplan.specs.model import (
    Attention,
    LatentAttention,
    Layer,
    LinearAttention,
    Mlp,
    Moe,
)
from topoplan.specs.profile import Calibrated, MeasuredPlan, OwnProfile
from topoplan.specs.spec import Spec

# Every field with a default has another value.
_GPU = replace(known.gpu("b200-sxm-180gb"), name="mine-180gb", bf16_flops=989 * 10**12, source="measured, “here”")
_QWEN = known.model("Qwen/Qwen3-VL-8B-Instruct")
_SOFTMAX = Attention(
    heads=8, kv_heads=2, head_dim=64, qkv_bias=True, out_bias=True, qk_norm=True, output_gate=True, sinks=True, window=9
)
_LATENT = LatentAttention(
    heads=8, q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
_LINEAR = LinearAttention(key_heads=4, value_heads=8, key_head_dim=64, value_head_dim=65, conv_kernel=4)
_MLP = Mlp(intermediate_size=100, gated=False, bias=True)
_MOE = Moe(
    experts=8,
    experts_per_token=2,
    intermediate_size=64,
    shared_intermediate_size=32,
    shared_gate=True,
    gated=False,
    bias=True,
    router_bias=True,
    groups=4,
    groups_per_token=2,
)
_LAYERS = (
    *(Layer(attention=_SOFTMAX, ffn=_MLP),) * 3,
    Layer(attention=_LATENT, ffn=_MOE),
    Layer(attention=_LINEAR, ffn=_MLP),
    Layer(attention=_SOFTMAX, ffn=_MLP),
    Layer(attention=_SOFTMAX, ffn=_MOE, predicts_next=True),
)
FULL = Spec(
    cluster=Cluster(
        name="日本-1",
        nodes=2,
        gpus_per_node=4,
        gpu=_GPU,
        nvlink_bytes_per_s=0.0,
        nvlink_domain_gpus=1,
        pcie_bytes_per_s=32e9,
        nics_per_node=4,
        nic_bytes_per_s=12500000000,
        sockets=1,
        fabric=Fabric(
            kind="roce",
            latency_s=1e-6,
            rails=2,
            nodes_per_leaf=1,
            oversubscription=256.0,
            traffic_class=106,
            service_level=3,
            topology_file="/opt/topo.xml",
        ),
        host_memory_bytes=2**41,
        storage_bytes_per_s=3e9,
        cpu_cores=96,
        hosts=(
            Host(
                address="10.0.0.1",
                user="ada",
                port=2222,
                workdir="/a b/ü",
                venv="/opt/it's",
                socket_interface="eth0",
                hcas=("mlx5_0:1", "mlx5_1"),
            ),
            Host(address="n1"),
        ),
        env={"Z": "1", "A": 'two "words"'},
        secrets=("HF_TOKEN", "B"),
        software={"python": "3.12", "torch": "2.11.0"},
        margin=0.0,
        assumed=("nics_per_node",),
        unused=("fabric",),
        slurm={"partition": "a b", "requeue": True},
    ),
    model=replace(
        _QWEN,
        name="/data/my model",
        layers=_LAYERS,
        tie_word_embeddings=True,
        norm="layernorm",
        norm_bias=True,
        learned_positions=1024,
        hidden_dropout=0.1,
        mtp_layers=1,
        num_labels=3,
        config_path="/data/my model/config.json",
        quantization="fp8",
    ),
    job=Job(
        seq_len=4096,
        global_batch_size=64,
        precision="fp8",
        finetuning="lora",
        stage="dpo",
        reference_forwards=2,
        num_labels=3,
        dataset="a,b",
        dataset_dir="my data",
        template="qwen3",
        packing=True,
        lengths=Lengths(
            columns=(("messages", "conversations"), ("content_tag", "value")),
            counts=tuple((tokens, 1 + tokens % 7) for tokens in range(5, 90)),
            samples=171,
            source="a.json",
            rule="by eye",
            error=0.1,
            stride=3,
        ),
        samples=171,
        epochs=2,
        learning_rate=1e-5,
        lora_rank=8,
        lora_dropout=0.1,
        lora_target=("q_proj", "v_proj"),
        quantization_bit=8,
        freeze_trainable_layers=-3,
        pure_bf16=True,
        optimizer="adamw_8bit",
        freeze_vision_tower=False,
        freeze_multi_modal_projector=False,
        freeze_language_model=True,
        image_max_pixels=1000,
        images_per_sequence=0.0,
        token_imbalance=1.5,
        mtp_num_layers=1,
        trainer={"additional_configs": {"a": [1, 2.0, None, {"b": True}], "é": ""}, "save_steps": 0.5, "z": "1e5"},
        pin={"tp": 2, "recompute": {"granularity": "selective", "modules": ["mlp"]}},
    ),
    profile=OwnProfile(
        gpu="blackwell",
        constants={"gemm_tile": (128, 256), "kernel_launch_s": 0.0, "flash_attention": False, "context_bytes": 2**30},
        source="my bench",
        path="own.yaml",
        calibrated=Calibrated(
            date="2026-11-23",
            trainer="swift",
            versions={"ms_swift": "4.5.2"},
            measured=(
                MeasuredPlan(
                    model="Qwen3-8B",
                    plan="tp2-pp1-dp4-mbs1",
                    steps=20,
                    step_s=1.5,
                    needs_at_least_gib=70.0,
                    spread=0.02,
                ),
            ),
        ),
    ),
)


def again(spec: Spec) -> Spec:
    return read(spec_to_dict(spec, whole=True))


def read(view: Mapping[str, Any]) -> Spec:
    return spec_from_dict(parse_json(json.dumps({"inputs": view}, indent=1), name="plan.json"), ("inputs",))


def assert_same(one: Any, other: Any, path: str = "spec") -> None:
    """Assert that values and types are equal, and mappings in the same order, so that both are written identically."""
    assert type(one) is type(other), path
    if is_dataclass(one):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name), f"{path}.{field.name}")
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}[{index}]")
    else:
        assert one == other, path


def classes(kind: Any) -> Iterator[type]:
    """Return the dataclasses that an annotation refers to."""
    if is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from classes(hint)
    for argument in get_args(kind):
        yield from classes(argument)


def instances(value: Any) -> Iterator[Any]:
    """Return the dataclass instances in a value."""
    if is_dataclass(value):
        yield value
        for field in fields(value):
            yield from instances(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from instances(item)


def test_every_field_of_every_class_comes_back() -> None:
    assert_same(again(FULL), FULL)


def test_no_field_of_the_sample_is_at_its_default() -> None:
    """A new field has to be set in the sample; the test above then shows whether it is written."""
    found = list(instances(FULL))
    for kind in set(classes(Spec)):
        ours = [value for value in found if type(value) is kind]
        assert ours, kind
        for field in fields(kind):
            if not field.compare:
                continue  # the name of the class
            if kind is Spec and field.name in ("path", "data_note", "backends", "trainer", "avoids_faults"):
                continue  # where the spec came from, beside what data, and what to search: not what it says
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            values = [getattr(value, field.name) for value in ours]
            assert any(type(value) is not type(default) or value != default for value in values), (kind, field.name)


def test_what_is_absent_stays_absent() -> None:
    spec = replace(
        FULL,
        profile=None,
        cluster=replace(FULL.cluster, hosts=(), env={}, secrets=(), margin=None, fabric=Fabric()),
        model=replace(FULL.model, vision=None, config_path=None),
        job=Job(seq_len=1, global_batch_size=1),
    )
    assert_same(again(spec), spec)


def test_equal_layers_are_one_shared_object() -> None:
    layers = again(FULL).model.layers
    assert layers[0] is layers[2] is layers[5]


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_every_gpu_of_the_catalog_comes_back(name: str) -> None:
    spec = replace(FULL, profile=None, cluster=replace(FULL.cluster, gpu=known.gpu(name)))
    assert_same(again(spec), spec)


def test_every_model_of_the_catalog_comes_back() -> None:
    for name in catalog.model_names():
        spec = replace(FULL, model=known.model(name))
        assert_same(again(spec), spec)


@given(st.dictionaries(st.integers(1, 10**9), st.integers(1, 10**12), min_size=1))
def test_any_lengths_come_back(counts: dict[int, int]) -> None:
    lengths = Lengths(counts=tuple(sorted(counts.items())), samples=1, source="x")
    spec = replace(FULL, job=replace(FULL.job, lengths=lengths))
    assert again(spec).job.lengths == lengths


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the form of the sample with one value changed, or removed if it is `...`."""
    view: Any = spec_to_dict(FULL, whole=True)
    *blocks, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    inner = view
    for part in blocks:
        inner = inner[part]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return dict(view)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cluster", ..., "`cluster` is missing in `inputs`"),
        ("cluster", 3, "inputs.cluster: 3 is not a block of keys; expected `key: value` lines"),
        ("cluster.nodes", "four", "inputs.cluster.nodes: 'four' is not a whole number"),
        ("cluster.nodes", 0, "inputs.cluster.nodes: 0 is out of range; expected a whole number from 1 to 131072"),
        ("cluster.nodes", ..., "`nodes` is missing in `inputs.cluster`"),
        ("cluster.ndoes", 4, "unknown key 'ndoes' in `inputs.cluster`; did you mean 'nodes'?"),
        ("cluster.gpu.architecture", "kepler", "gpu.architecture: 'kepler' is not a choice; expected volta, ampere"),
        ("cluster.gpu.bf16_flops", 0, "gpu.bf16_flops: 0 is out of range; expected a number from 1e-12 to 1e+18"),
        ("cluster.gpu.bf16_flops", 10**400, "gpu.bf16_flops: a number of hundreds of digits is out of range"),
        ("cluster.fabric.kind", "token ring", "fabric.kind: 'token ring' is not a choice; expected infiniband, roce"),
        ("cluster.hosts.1.address", "-oProxyCommand=x", "hosts[1].address: '-oProxyCommand=x' is not usable"),
        ("cluster.env.HF_TOKEN", "x", "env.HF_TOKEN: looks like a secret"),
        ("model.norm", "batchnorm", "inputs.model.norm: 'batchnorm' is not a choice; expected rmsnorm or layernorm"),
        ("model.num_layers", 36, "inputs.model.num_layers: 36 does not agree with its block; expected 7"),
        ("model.layers", [], "inputs.model.layers: 0 layers; expected 1 to 4096"),
        ("model.layers", ..., "`layers` is missing in `inputs.model`"),
        ("model.layers.0.count", 10**12, "layers[0].count: 1000000000000 is out of range; expected"),
        ("model.layers.0.count", ..., "`count` is missing in `inputs.model.layers[0]`"),
        ("model.layers.0.attention.kind", "flash", "kind: 'flash' is not a choice; expected attention, latent_"),
        ("model.layers.0.attention.kind", ..., "layers[0].attention.kind: null is not a choice; expected"),
        ("model.layers.1.attention.window", 3, "unknown key 'window' in `inputs.model.layers[1].attention`"),
        ("job.trainer.hub_token", "x", "trainer.hub_token: looks like a secret"),
        ("job.pin.tp", 0, "pin.tp: 0 is out of range"),
        ("job.lengths.counts", ..., "job.lengths.counts: is missing, or is an empty length histogram; expected"),
        ("job.lengths.counts.0", "5:1 6", "counts[0]: '6' is no pair; expected tokens:count, such as 512:1000"),
        ("job.lengths.counts.1", 7, "lengths.counts[1]: 7 is not text"),
        ("job.lengths.mean", 7, "inputs.job.lengths.mean: 7 does not agree with its block; expected 47.0"),
        ("profile.gpu", "ampere", "inputs.profile.gpu: ampere, and the cluster has mine-180gb"),
        ("profile.constants.gemm_tile", [1, 2], "gemm_tile: a list is out of range"),
        ("profile.constants.warp_speed", 9, "unknown key 'warp_speed'"),
        ("path", "a.yaml", "unknown key 'path' in `inputs`"),
    ],
)  # fmt: skip
def test_what_a_person_may_have_written_is_held_to_type_and_range(path: str, value: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        read(changed(path, value))
    assert message in str(error.value)
    assert str(error.value).startswith("plan.json:")
    assert "\n" not in str(error.value)


def test_a_message_names_the_line() -> None:
    text = json.dumps({"inputs": changed("cluster.sockets", "two")}, indent=1)
    line = next(number for number, words in enumerate(text.splitlines(), start=1) if '"sockets"' in words)
    with pytest.raises(
        SpecError, match=f"^plan.json:{line}: inputs.cluster.sockets: 'two' is not a whole number; expected"
    ):
        spec_from_dict(parse_json(text, name="plan.json"), ("inputs",))


def test_a_document_without_inputs_or_with_too_many_gpus_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^plan\.json: `inputs` is missing$"):
        spec_from_dict(parse_json("{}", name="plan.json"), ("inputs",))
    with pytest.raises(SpecError, match=r"inputs\.cluster\.nodes: 160000 GPUs; expected at most 131072$"):
        read(changed("cluster.nodes", 40_000))


def test_keys_with_a_default_may_be_missing() -> None:
    """As in the file of an earlier version."""
    assert read(changed("cluster.sockets", ...)).cluster.sockets == 2
    assert read(changed("job.token_imbalance", ...)).job.token_imbalance is None


@pytest.mark.parametrize("nodes", [2, 2.0, "2"])
def test_values_are_read_as_in_a_spec_file(nodes: object) -> None:
    found = read(changed("cluster.nodes", nodes)).cluster.nodes
    assert (found, type(found)) == (2, int)


def test_pins_and_constants_are_read_as_in_a_spec_file() -> None:
    spec = read(changed("profile.constants", {"gemm_efficiency": "70%", "nvlink_efficiency": 1, "hop_latency_s": None}))
    assert spec.profile.constants == {"gemm_efficiency": 0.7, "nvlink_efficiency": 1}
    assert read(changed("job.pin", {"tp": "4", "pp": None})).job.pin == {"tp": 4}
