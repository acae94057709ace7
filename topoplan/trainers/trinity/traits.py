"""How Trinity-RFT's trainer computes: verl on FSDP.

Sources: Trinity-RFT 0.4.0 and 0.6.0 (`common/config.py`, `common/verl_config.py`, `trainer/verl/fsdp_workers.py`,
`trainer/verl/dp_actor.py`), verl 0.5.0 (`workers/actor/dp_actor.py`, `utils/torch_functional.py`,
`utils/fsdp_utils.py`), PyTorch's FSDP and autograd engine.
"""

from __future__ import annotations

from dataclasses import replace

from topoplan.specs.traits import Loss, Padding, Traits

_BF16 = 2
LOGITS_AT_PEAK = 4
"""bf16 copies of the logits' size that exist at the peak of their backward pass.

verl divides the logits by the temperature in place, on a view of the model's output (`logits_rmpad.div_`). Autograd
runs that backward as a CopySlices node (PyTorch `csrc/autograd/functions/tensor.cpp`, CopySlices::apply_impl), with
four copies: the incoming gradient, its copy for the base, a contiguous clone of the view, and the divided result.
Earlier phases have three: the logits, and the gradients of the log-probability (flash-attn's cross entropy, not in
place if there is an entropy) and of the entropy, whose compiled forward saves only the logits."""

TRINITY = Traits(
    name="trinity",
    padding=Padding(removed=True),
    reduces_in_fp32=True,
    loss=Loss(
        forward_bytes=_BF16,
        backward_bytes=LOGITS_AT_PEAK * _BF16,
        # The division in place (4), and one read each for log-probability and entropy; their gradients (8) and sum (6),
        # and in CopySlices a copy, a clone and a division (12).
        forward_moved_bytes=4 * _BF16,
        backward_moved_bytes=13 * _BF16,
    ),
    adam_bytes=4,
    stranded_bytes=_BF16,
    distributes_one_gpu=True,
    sends_weights=True,
)
"""How verl trains under Trinity-RFT with FSDP 2, which files are written for.

- Logits are computed for all tokens at once in bf16.
- use_remove_padding with use_dynamic_bsz: a micro-batch is filled with whole samples up to max_token_len_per_gpu, and
  balance_batch gives each rank a similar number of tokens.
- foreach AdamW needs one more fp32 tensor per parameter, the square root of the second moment
  (`torch/optim/adam.py::_multi_tensor_adam`).
- Without expandable segments one block of the logits' size is stranded: the first update frees its logits blocks,
  Adam's moments are allocated in one of them (best fit, blocks are split), and the next update needs a whole block to
  replace it (PyTorch `c10/cuda/CUDACachingAllocator.cpp`).
- A single worker also creates a process group (`fsdp_workers.py`, __init__).
- Weights are sent to the explorer over a communicator of two ranks (`setup_weight_sync_group`). Runs without one, such
  as SFT, are predicted with it too, because their files also serve reinforcement learning."""

TRINITY_FSDP1 = replace(TRINITY, fsdp_version=1)
"""TRINITY with the trainer's default, `trainer_strategy: fsdp` (`fsdp_workers.py`, _build_model_optimizer)."""
