"""How Trinity-RFT's trainer computes: verl on FSDP.

Sources, of the versions that were read: Trinity-RFT 0.4.0 and 0.6.0 (`common/config.py`, `common/verl_config.py`,
`trainer/verl/fsdp_workers.py`, `trainer/verl/dp_actor.py`), verl 0.5.0 (`workers/actor/dp_actor.py`,
`utils/torch_functional.py`, `utils/fsdp_utils.py`), PyTorch's FSDP and autograd engine.
"""

from __future__ import annotations

from dataclasses import replace

from topoplan.specs.traits import Loss, Padding, Traits

_BF16 = 2
LOGITS_AT_PEAK = 4
"""bf16 copies of the logits' size alive at the worst moment of their backward.

verl divides the logits by the temperature in place, on a view of the model's output (`logits_rmpad.div_`), and autograd
runs that backward as a CopySlices node (PyTorch `csrc/autograd/functions/tensor.cpp`, CopySlices::apply_impl): the
incoming gradient, its copy for the base, a contiguous clone of the view and the divided result. Earlier moments have
three: logits and the gradients of log-probability (flash-attn's cross entropy, not in place where there is an entropy)
and of the entropy, whose compiled forward saves the logits alone."""

TRINITY = Traits(
    name="trinity",
    padding=Padding(removed=True),
    reduces_in_fp32=True,
    loss=Loss(
        forward_bytes=_BF16,
        backward_bytes=LOGITS_AT_PEAK * _BF16,
        # The division in place (4), and one reading each for log-probability and entropy; the gradients of both (8)
        # and their sum (6), and in CopySlices a copy, a clone and a division (12).
        forward_moved_bytes=4 * _BF16,
        backward_moved_bytes=13 * _BF16,
    ),
    adam_bytes=4,
    stranded_bytes=_BF16,
    distributes_one_gpu=True,
    sends_weights=True,
)
"""How verl trains under Trinity-RFT with FSDP 2, which is what files are written for.

- Logits are computed for all tokens at once in bf16.
- use_remove_padding with use_dynamic_bsz: a micro batch is filled with whole samples up to max_token_len_per_gpu, and
  balance_batch gives each rank about as many tokens.
- foreach AdamW has one more fp32 tensor for every parameter, the square root of the second moment
  (`torch/optim/adam.py::_multi_tensor_adam`).
- Without expandable segments one block of the logits' size is lost: the first update leaves its logits blocks free,
  Adam's moments are then put into one of them (best fit, blocks are split), and the next update needs a whole one in
  its place (PyTorch `c10/cuda/CUDACachingAllocator.cpp`).
- A single worker makes a process group as well (`fsdp_workers.py`, __init__).
- Weights go to the explorer over a communicator of two (`setup_weight_sync_group`). A run without one, such as SFT, is
  taken to have it too: the blocks that files get serve a run of reinforcement learning as well."""

TRINITY_FSDP1 = replace(TRINITY, fsdp_version=1)
"""The same with Trinity-RFT's own default, `trainer_strategy: fsdp` (`fsdp_workers.py`, _build_model_optimizer)."""
