import pytest

from tests.reading.setups import MEGATRON, MOE, make_setup, with_lines
from topoplan.layout.layout import Layout
from topoplan.specs import known
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.rules.mca_layouts import UNKNOWN_MODEL, spec_and_layout

DENSE, EXPERTS = known.model("Qwen/Qwen3-8B"), known.model("Qwen/Qwen3-30B-A3B")


def asked(text: str, moe: bool = False) -> tuple[Spec, Layout]:
    found = spec_and_layout(make_setup(text).configurations[0], EXPERTS if moe else DENSE)
    assert found is not None
    return found


def test_the_degrees_are_those_of_the_file_on_the_fewest_gpus() -> None:
    lines = "pipeline_model_parallel_size: 2\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4"
    spec, layout = asked(with_lines(MEGATRON, lines))
    assert (layout.tp, layout.pp, layout.dp, layout.micro_batch_size) == (2, 2, 1, 2)
    assert spec.cluster.world_size == layout.world_size == 4
    assert spec.job.global_batch_size == 8
    assert spec.job.seq_len == 4096


def test_experts_take_the_tensor_parallel_size_unless_told_otherwise() -> None:
    assert asked(MOE, moe=True)[1].etp == 1
    assert asked(with_lines(MOE, "expert_tensor_parallel_size: -"), moe=True)[1].etp == 2
    assert asked(MEGATRON)[1].etp == 1


def test_sequence_parallelism_is_what_the_adapter_makes_of_it() -> None:
    assert asked(MEGATRON)[1].sequence_parallel
    assert not asked(with_lines(MEGATRON, "tensor_model_parallel_size: 1"))[1].sequence_parallel
    assert asked(with_lines(MOE, "sequence_parallel: false"), moe=True)[1].sequence_parallel


def test_full_recomputation_alone_is_uniform_in_ones() -> None:
    recompute = asked(with_lines(MEGATRON, "recompute_granularity: full"))[1].recompute
    assert (recompute.granularity, recompute.method, recompute.num_layers) == ("full", "uniform", 1)
    modules = asked(with_lines(MEGATRON, "recompute_granularity: selective\nrecompute_modules: mlp,moe"))[1].recompute
    assert modules.modules == ("mlp", "moe")


@pytest.mark.parametrize(
    "lines",
    [
        "tensor_model_parallel_size: four",
        "tensor_model_parallel_size: 0",
        "tensor_model_parallel_size: 100000000",
        "expert_tensor_parallel_size: none",
        "gradient_accumulation_steps: -1",
        "cutoff_len: long",
    ],
)
def test_there_is_no_layout_where_a_number_is_none(lines: str) -> None:
    configuration = make_setup(with_lines(MEGATRON, lines)).configurations[0]
    assert spec_and_layout(configuration, DENSE) is None


def test_a_file_that_names_no_degree_asks_for_no_layout() -> None:
    assert spec_and_layout(make_setup("cutoff_len: 4096").configurations[0], UNKNOWN_MODEL) is None
