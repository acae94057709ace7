"""Bytes of a logit where the loss is that of Hugging Face's models."""

from __future__ import annotations

from topoplan.operators.op import BF16, FP32

LOGIT_BYTES = 3 * FP32
"""Bytes a logit at the start of backward: the saved log softmax, the gradient of the negative log likelihood, and that
of the log softmax, all in fp32. transformers `loss/loss_utils.py::ForCausalLMLoss` computes in fp32, and the model's
own logits are gone by then (`Trainer.compute_loss` hands back the loss alone)."""
FORWARD_LOGIT_BYTES = BF16 + 2 * FP32
"""The same at the end of forward: the logits, their fp32 form, and the log softmax."""
CHUNKED_LOGIT_BYTES = BF16 + FP32
"""The same for the chunk of rows that Liger's fused loss works on: logits, turned into gradients in place, and their
fp32 form (`liger_kernel/ops/fused_linear_cross_entropy.py`)."""
