"""Bytes per logit where the loss is that of Hugging Face models."""

from __future__ import annotations

from topoplan.operators.op import BF16, FP32

LOGIT_BYTES = 3 * FP32
"""Bytes per logit at the start of backward: the saved log softmax, the gradient of the negative log likelihood and the
gradient of the log softmax, all in fp32. transformers `loss/loss_utils.py::ForCausalLMLoss` computes in fp32, and the
model's own logits are freed by then (`Trainer.compute_loss` returns only the loss)."""
FORWARD_LOGIT_BYTES = BF16 + 2 * FP32
"""Bytes per logit at the end of forward: the logits, their fp32 copy, and the log softmax."""
CHUNKED_LOGIT_BYTES = BF16 + FP32
"""Bytes per logit in the chunk of rows that Liger's fused loss works on: logits, overwritten with gradients in place,
and their fp32 copy (`liger_kernel/ops/fused_linear_cross_entropy.py`)."""
