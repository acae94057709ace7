import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topoplan.errors import InputError, SpecError, TopoplanError
from topoplan.specs.forms import JobForm, SpecForm
from topoplan.specs.load import load_spec, spec_from_document
from topoplan.specs.mistakes import keys_of
from topoplan.specs.spec import Spec

SPEC = """\
name: box
nodes: 4
gpus_per_node: 8
gpu: h100-sxm-80gb
nvlink_bandwidth: 900GB/s
ib_bandwidth: 400Gb/s
nics_per_node: 8
model: Qwen/Qwen3-8B
job:
  seq_len: 4096
  global_batch_size: 64
  pin: {tp: 4}
"""
DOCUMENT: dict[str, Any] = {
    "id": "any",
    "cluster": {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8},
    "model": {"name": "Qwen/Qwen3-8B"},
    "job": {"seq_len": 4096, "global_batch_size": 64, "precision": "bf16", "finetuning": "full"},
    "layout": {"backend": "megatron", "tp": 4, "pp": 1, "micro_batch_size": 1},
}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True, scope="module")
def _no_hub() -> Iterator[None]:
    """Invalid model names must not be looked up on the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "huggingface_hub", None)
        yield


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "box.yaml"
    path.write_text(SPEC)
    return path


def _load(tmp_path: Path, old: str, new: str, **options: Any) -> Spec:
    assert old in SPEC
    path = tmp_path / "box.yaml"
    path.write_text(SPEC.replace(old, new, 1))
    return load_spec(path, **options)


class TestASpecFile:
    def test_becomes_a_cluster_a_model_and_a_job(self, spec_file: Path) -> None:
        spec = load_spec(spec_file)
        assert spec.cluster.world_size == 32
        assert spec.cluster.nvlink_bytes_per_s == 450e9
        assert spec.model.name == "Qwen/Qwen3-8B"
        assert (spec.job.seq_len, spec.job.global_batch_size, spec.job.pin) == (4096, 64, {"tp": 4})
        assert spec.path == str(spec_file)

    def test_may_be_named_by_text(self, spec_file: Path) -> None:
        assert load_spec(str(spec_file)).cluster.name == "box"

    def test_lends_its_name_to_the_cluster(self, tmp_path: Path) -> None:
        assert _load(tmp_path, "name: box\n", "").cluster.name == "box"
        odd = tmp_path / "..my box!.yaml"
        odd.write_text(SPEC.replace("name: box\n", ""))
        assert load_spec(odd).cluster.name == "my-box"

    def test_may_name_its_schema(self, tmp_path: Path) -> None:
        assert _load(tmp_path, "name: box", "$schema: ./spec.schema.json\nname: box").cluster.nodes == 4

    def test_may_be_json(self, tmp_path: Path) -> None:
        path = tmp_path / "box.json"
        path.write_text(json.dumps({**DOCUMENT["cluster"], "model": "Qwen/Qwen3-8B", "job": DOCUMENT["job"]}))
        assert load_spec(path).cluster.nvlink_bytes_per_s == 450e9

    def test_takes_a_quoted_no_for_a_key_of_the_trainer(self, tmp_path: Path) -> None:
        job = _load(tmp_path, "  pin: {tp: 4}", "  trainer: {eval_strategy: 'no', x: false}").job
        assert job.trainer == {"eval_strategy": "no", "x": False}

    def test_takes_a_bare_no_where_the_kind_of_value_is_known(self, tmp_path: Path) -> None:
        assert _load(tmp_path, "name: box", "name: no").cluster.name == "no"
        assert _load(tmp_path, "  pin: {tp: 4}", "  packing: no").job.packing is False

    def test_may_hold_the_models_config(self, tmp_path: Path) -> None:
        model = _load(tmp_path, "model: Qwen/Qwen3-8B", f"model: {{name: tiny, config: {json.dumps(CONFIG)}}}").model
        assert (model.name, model.num_layers, model.hidden_size) == ("tiny", 2, 256)

    def test_finds_a_model_beside_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "tiny").mkdir()
        (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
        monkeypatch.chdir("/")
        assert _load(tmp_path, "Qwen/Qwen3-8B", "./tiny").model.num_layers == 2
        assert _load(tmp_path, "Qwen/Qwen3-8B", "tiny/config.json").model.num_layers == 2


class TestARunDocument:
    def test_becomes_a_spec(self) -> None:
        spec = spec_from_document(DOCUMENT, where="runs.jsonl:3")
        assert (spec.cluster.world_size, spec.model.name, spec.job.seq_len) == (32, "Qwen/Qwen3-8B", 4096)
        assert spec.path is None

    def test_is_left_as_it_was(self) -> None:
        before = copy.deepcopy(DOCUMENT)
        spec_from_document(DOCUMENT, where="runs.jsonl:3")
        assert before == DOCUMENT

    def test_may_hold_a_config(self) -> None:
        document = {**DOCUMENT, "model": {"config": CONFIG}}
        assert spec_from_document(document, where="runs.jsonl:3").model.num_layers == 2

    def test_may_hold_a_whole_spec_with_model_and_job(self) -> None:
        whole = {**DOCUMENT["cluster"], "model": "Qwen/Qwen3-14B", "job": DOCUMENT["job"]}
        assert spec_from_document({"cluster": whole}, where="x").model.name == "Qwen/Qwen3-14B"
        document = {"cluster": whole, "model": {"name": "Qwen/Qwen3-8B"}}
        assert spec_from_document(document, where="x").model.name == "Qwen/Qwen3-8B"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"cluster": None}, "runs.jsonl:3: `cluster` is missing; give it as"),
            ({"cluster": "h100"}, "runs.jsonl:3: cluster: h100 is not a block of keys"),
            ({"cluster": {1: 2}}, "runs.jsonl:3: has a key that is not text"),
            ({"cluster": {"gpu": "a100"}}, "runs.jsonl:3: gpu: GPU 'a100' is not one card"),
            ({"cluster": {"nodes": 4}}, "runs.jsonl:3: `gpu` is missing"),
            ({"model": None}, "runs.jsonl:3: `model` is missing"),
            ({"model": {"name": "Qwen3-8BB"}}, "runs.jsonl:3: model: "),
            ({"model": {"config": {}}}, "runs.jsonl:3: model.config: "),
            ({"job": None}, "runs.jsonl:3: `job` is missing"),
            ({"job": {"seq_len": 1}}, "runs.jsonl:3: `global_batch_size` is missing in `job`"),
            ({"job": []}, "runs.jsonl:3: job: a list is not a block of keys"),
        ],
    )
    def test_names_itself_in_its_errors(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError) as error:
            spec_from_document({**DOCUMENT, **change}, where="runs.jsonl:3")
        assert str(error.value).startswith(message)

    def test_that_is_no_mapping_is_refused(self) -> None:
        with pytest.raises(SpecError, match=r"^runs\.jsonl:3: is not a run document"):
            spec_from_document([1], where="runs.jsonl:3")  # type: ignore[arg-type]


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["900GB/s", "400Gb/s", "h100-sxm-80gb", "Qwen/Qwen3-8B", "8%", "no", "tp", "full", "5us"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_cluster_keys = st.sampled_from([*keys_of(SpecForm), "$schema"])
_job_keys = st.sampled_from(list(keys_of(JobForm)))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(_cluster_keys, _values, max_size=3), st.dictionaries(_job_keys, _values, max_size=3))
def test_no_document_gives_anything_but_a_spec_or_a_topoplan_error(cluster: Any, job: Any) -> None:
    document = {**DOCUMENT, "cluster": {**DOCUMENT["cluster"], **cluster}, "job": {**DOCUMENT["job"], **job}}
    with contextlib.suppress(TopoplanError):
        assert isinstance(spec_from_document(document, where="x"), Spec)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.tuples(st.integers(0, len(SPEC)), st.integers(0, 12), st.text(max_size=12)).map(
            lambda cut: (SPEC[: cut[0]] + cut[2] + SPEC[cut[0] + cut[1] :]).encode("utf-8", "surrogatepass")
        ),
    )
)
def test_no_file_gives_anything_but_a_spec_or_a_topoplan_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(content)
    with contextlib.suppress(TopoplanError):
        assert isinstance(load_spec(path), Spec)


@settings(deadline=None)
@given(st.lists(st.text(max_size=30), max_size=2), st.text(max_size=30))
def test_no_option_gives_anything_but_a_spec_or_a_topoplan_error(overrides: list[str], pins: str) -> None:
    path = Path(__file__).parents[2] / "cluster_specs" / "h100-4x8.yaml"
    with contextlib.suppress(TopoplanError):
        load_spec(path, overrides=overrides)
    with contextlib.suppress(TopoplanError):
        load_spec(path, pins=pins)


@pytest.mark.parametrize(
    "written",
    ["[[512, 10], [1024, 3]]", "{512: 10, 1024: 3}", "lengths.csv"],
)
def test_lengths_are_given_in_the_spec_or_in_a_file_beside_it(written: str, tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("tokens,count\n512,10\n1024,3\n")
    (tmp_path / "spec.yaml").write_text(SPEC + f"  lengths: {written}\n")
    job = load_spec(tmp_path / "spec.yaml").job
    assert job.lengths.counts == ((512, 10), (1024, 3))
    assert job.samples == job.lengths.samples == 13


def test_a_data_set_beside_the_spec_gives_lengths_and_samples(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    (tmp_path / "data" / "mine.json").write_text(json.dumps([{"instruction": "x" * 43, "output": ""}] * 70))
    (tmp_path / "spec.yaml").write_text(SPEC + "  dataset: mine\n")
    job = load_spec(tmp_path / "spec.yaml").job
    assert (job.samples, job.lengths.source) == (70, "mine.json")
    held_back = load_spec(tmp_path / "spec.yaml", overrides=["trainer.val_size=0.1"]).job
    assert held_back.samples == 63
    assert load_spec(tmp_path / "spec.yaml", overrides=["samples=5"]).job.samples == 5
    assert load_spec(tmp_path / "spec.yaml", overrides=["trainer.streaming=true"]).job.lengths is None
    named = load_spec(tmp_path / "spec.yaml", overrides=["dataset=mine", f"dataset_dir={tmp_path / 'data'}"]).job
    assert named.lengths == job.lengths
    elsewhere = load_spec(tmp_path / "spec.yaml", overrides=["dataset=org/name"]).job
    assert (elsewhere.lengths, elsewhere.samples) == (None, None)


def test_packed_samples_are_counted_in_sequences(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC + "  lengths: {1024: 400}\n  packing: true\n")
    assert load_spec(tmp_path / "spec.yaml").job.samples == 100
    assert load_spec(tmp_path / "spec.yaml", overrides=["stage=dpo"]).job.samples == 200
    with pytest.raises(SpecError, match=r"400 samples of job.lengths fill no sequence of 1000000 tokens"):
        load_spec(tmp_path / "spec.yaml", overrides=["stage=pt", "seq_len=1000000"])


def test_a_document_is_no_path_of_a_spec() -> None:
    with pytest.raises(SpecError, match=r"a dict is no spec file; expected the path of a YAML file; .*overrides="):
        load_spec({"nodes": 8})  # type: ignore[arg-type]
