"""Errors of LLaMA-Factory's Megatron path, from its own code, which a bundle refuses or warns of.

Runs if mcore_adapter is installed (it is not on PyPI). If a test fails after an update, a limit was removed.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.bundle.samples import QWEN3_8B, QWEN3_30B, QWEN3_VL_8B, make_spec_and_plan
from tests.verify.llamafactory import need_llamafactory
from tests.verify.megatron import fake_world
from topoplan.trainers.llamafactory.key_list import known_keys
from topoplan.trainers.llamafactory.mca_refusals import preferences, resumable

REASON = "mcore_adapter is not installed (https://github.com/alibaba/ROLL, mcore_adapter/)"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("mcore_adapter", reason=REASON)

pytestmark = [pytest.mark.verify, pytest.mark.filterwarnings("ignore")]

TOKENS = 65
"""Tokens of a sample of stage dpo: 64 after the last one is cut off for the shift of the labels."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    with fake_world(1):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield


# Stage dpo -----------------------------------------------------------------------------------------------------------


def batch_of_pairs(model: Any, mm_plugin: Any, images: list[str]) -> dict[str, Any]:
    need_llamafactory()
    import mcore_adapter.models  # noqa: F401  before the workflow, which imports parts of it
    from llamafactory.data.collator import PairwiseDataCollatorWithPadding
    from llamafactory.train.mca.workflow import _data_collator_wrapper
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="right"
    )
    collator = _data_collator_wrapper(
        PairwiseDataCollatorWithPadding(
            template=SimpleNamespace(mm_plugin=mm_plugin),
            model=model,
            pad_to_multiple_of=64,
            label_pad_token_id=-100,
            tokenizer=tokenizer,
        )
    )
    ids = [2, *([4] * 4 if images else []), 3, *[10] * TOKENS][:TOKENS]
    pair = {"images": images, "videos": None, "audios": None}
    for side in ("chosen", "rejected"):
        pair |= {f"{side}_input_ids": [*ids], f"{side}_attention_mask": [1] * TOKENS, f"{side}_labels": [*ids]}
    batch: dict[str, Any] = collator([pair])
    return batch


def test_a_pair_keeps_a_mask_that_is_longer_than_its_tokens() -> None:
    batch = batch_of_pairs(None, SimpleNamespace(image_token=None, audio_token=None, get_mm_inputs=lambda *_: {}), [])
    assert batch["input_ids"].shape == (2, TOKENS - 1)
    assert batch["attention_mask"].shape == (2, TOKENS)


def test_a_pair_with_images_ends_in_an_error() -> None:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2VLConfig(
        text_config={"vocab_size": 60, "intermediate_size": 16, **small},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2},
        image_token_id=4,
        video_token_id=5,
        vision_start_token_id=2,
        vision_end_token_id=3,
    )
    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(config)
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    plugin = SimpleNamespace(image_token="<image>", audio_token=None, get_mm_inputs=lambda *_: grid)
    with pytest.raises(IndexError, match="shape of the mask"):
        batch_of_pairs(model, plugin, ["an image"])
    (refusal,) = preferences(make_spec_and_plan(model=QWEN3_VL_8B, job={"stage": "dpo"})[0])
    assert "cannot find the images" in refusal.what


def test_the_mask_of_a_pair_cannot_be_cut_for_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_adapter.models import model_factory

    monkeypatch.setattr(model_factory.mpu, "get_context_parallel_rank", lambda: 0)
    model = SimpleNamespace(config=SimpleNamespace(context_parallel_size=2))
    with pytest.raises(RuntimeError, match="is invalid for input of size 130"):
        model_factory.PretrainedModel.get_batch_on_this_cp_rank(model, {"attention_mask": torch.zeros(2, TOKENS)}, [])


def test_only_dense_models_are_spared_the_mask(one_rank: None) -> None:
    from mcore_adapter.trainer import McaTrainer

    for experts in (None, 8):
        trainer = MagicMock(spec=["args", "model", "model_impl", "_get_batch_on_this_cp_rank"])
        trainer.args.sequence_packing, trainer.model_impl = False, "transformer_engine"
        trainer.model.config.num_moe_experts, trainer.model.config.mtp_num_layers = experts, None
        trainer._get_batch_on_this_cp_rank = lambda batch: batch
        pair = {"input_ids": torch.zeros(2, 64, dtype=torch.long), "attention_mask": torch.ones(2, TOKENS)}
        batch = McaTrainer._prepare_train_inputs(trainer, iter([pair]))
        assert (batch["attention_mask"] is None) == (experts is None)


def test_the_losses_that_the_adapter_has_are_those_of_the_key_list() -> None:
    import typing

    from mcore_adapter.trainer.dpo_config import DPOConfig

    assert typing.get_args(typing.get_type_hints(DPOConfig)["pref_loss"]) == known_keys()["pref_loss"].choices


# The training loop ---------------------------------------------------------------------------------------------------


def test_as_many_steps_of_warm_up_as_there_are_end_in_an_error() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def schedule(warmup: int, steps: int) -> None:
        OptimizerParamScheduler(
            optimizer=SimpleNamespace(param_groups=[]),
            init_lr=0.0,
            max_lr=1e-5,
            min_lr=0.0,
            lr_warmup_steps=warmup,
            lr_decay_steps=steps,
            lr_decay_style="cosine",
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    for steps in (1, 2, 33):
        schedule(steps - 1, steps)
        with pytest.raises(AssertionError):
            schedule(steps, steps)


class Batches(list[Any]):
    """A dataloader with a given number of batches."""


@pytest.mark.parametrize(("batches", "ends"), [(3, True), (4, False), (5, False)])
def test_an_epoch_without_a_full_batch_ends_in_a_division_by_zero(batches: int, ends: bool) -> None:
    from mcore_adapter.trainer import McaTrainer

    trainer = MagicMock()
    loader = Batches({"input_ids": torch.zeros(1, 8)} for _ in range(batches))
    trainer._prepare_train_loop.return_value = (0, 1, loader, batches, 0, 1, 1, None)
    for name in ("_get_train_cyclic_iterator", "_get_step_iterator_and_seq_length"):
        setattr(trainer, name, getattr(McaTrainer, name).__get__(trainer))
    trainer.args.gradient_accumulation_steps, trainer.args.per_device_train_batch_size = 4, 1
    trainer.args.calculate_per_token_loss, trainer.args.device = False, "cpu"
    trainer.model.main_input_name = "input_ids"
    trainer.floating_point_ops.return_value = 0.0
    trainer.training_step.return_value = (torch.tensor(1.0), [], 0, None, 0)
    control = SimpleNamespace(should_epoch_stop=False, should_training_stop=False)
    trainer.control = control
    for callback in ("on_epoch_begin", "on_step_begin", "on_step_end", "on_epoch_end", "on_train_end"):
        getattr(trainer.callback_handler, callback).return_value = control
    trainer.state = SimpleNamespace(global_step=0, epoch=0.0, max_steps=1, total_flos=0)
    trainer._globalstep_last_logged, trainer._total_loss_scalar, trainer.current_flos = 0, 0.0, 0.0
    args = SimpleNamespace(gradient_accumulation_steps=4, max_steps=-1, logging_nan_inf_filter=True)
    if ends:
        with pytest.raises(ZeroDivisionError):
            McaTrainer._inner_training_loop(trainer, 1, args)
    else:
        McaTrainer._inner_training_loop(trainer, 1, args)
        # One more step than the data has full batches; the last one is filled up from the start.
        assert trainer.state.global_step == 2


def test_an_evaluation_of_less_than_a_full_batch_ends_in_an_error(one_rank: None) -> None:
    from mcore_adapter.trainer import McaTrainer

    trainer = SimpleNamespace(metrics_keys=["loss"], args=SimpleNamespace(device="cpu"))
    with pytest.raises(IndexError):
        McaTrainer.gather_metrics(trainer, [])


def test_packing_garbles_the_positions_of_images(one_rank: None) -> None:
    from mcore_adapter.trainer import McaTrainer

    trainer = MagicMock()
    trainer.args.sequence_packing = True
    trainer._language_input_names = McaTrainer._language_input_names
    mask = torch.tensor([[1] * 5 + [2] * 3])
    batch = {"input_ids": torch.zeros(1, 8), "attention_mask": mask, "position_ids": torch.zeros(3, 1, 8)}
    assert McaTrainer._packing_sequence(trainer, batch)["position_ids"].shape == (1, 3, 8)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_run_cannot_be_resumed_from_a_checkpoint_in_torch_dist(tmp_path: Path, one_rank: None) -> None:
    from mcore_adapter.trainer import McaTrainer
    from mcore_adapter.training_args import MegatronArguments

    folded = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    assert MegatronArguments(**folded).ckpt_format == "torch_dist"
    assert MegatronArguments(**folded | {"expert_tensor_parallel_size": 2}).ckpt_format == "legacy"
    model = tmp_path / "iter_0000001/dist_model"
    model.mkdir(parents=True)
    (model / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'sharded_state_dict'"):
        McaTrainer._load_from_checkpoint(MagicMock(), str(tmp_path), [torch.nn.Identity()])
    for etp in (1, 2):
        spec, plan = make_spec_and_plan(model=QWEN3_30B, tp=2, ep=2, etp=etp)
        assert resumable(spec, plan.layout) == (etp == 2)
    assert resumable(*(lambda spec, plan: (spec, plan.layout))(*make_spec_and_plan(model=QWEN3_8B, tp=2)))


def test_weights_with_scales_beside_them_end_in_an_error(tmp_path: Path, one_rank: None) -> None:
    from mcore_adapter.models.converter.model_converter import ModelConverter
    from mcore_adapter.models.model_config import McaModelConfig
    from safetensors.torch import save_file
    from transformers import Qwen3Config

    Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    ).save_pretrained(tmp_path)
    down = "model.layers.0.mlp.down_proj.weight"

    def load(weights: dict[str, Any]) -> dict[str, Any]:
        save_file(weights, tmp_path / "model.safetensors")
        converter = ModelConverter(McaModelConfig.from_pretrained(str(tmp_path), None))
        loaded: dict[str, Any] = converter.load_mca_state_dict_from_hf(str(tmp_path), vp_stage=None)
        return loaded

    assert list(load({down: torch.zeros(32, 64)})) == ["decoder.layers.0.mlp.linear_fc2.weight"]
    with pytest.raises(ValueError, match="Cannot find"):
        load({down: torch.zeros(32, 64).to(torch.float8_e4m3fn), f"{down}_scale_inv": torch.ones(1, 1)})
