"""What a run writes to disk: the sizes of a checkpoint."""

from __future__ import annotations

from typing import NamedTuple


class CheckpointSize(NamedTuple):
    """Bytes of one checkpoint over all its files, without logs and tokenizer, which are small."""

    megatron_bytes: int
    """Weights in Megatron's format; 0 if they are not saved."""
    hf_bytes: int
    """Weights in Hugging Face's format; 0 if they are not saved."""
    optimizer_bytes: int
    """Optimizer states; 0 if they are not saved."""
    at_once: int | None
    """Maximum number of checkpoints that exist at a time, counting an old one that is only removed once its successor
    is complete. None without a limit; 0 if only the final weights are saved."""

    what: str = "weights"
    """What a checkpoint holds besides optimizer states; with LoRA, adapters rather than weights."""

    saves_at_end: bool = True
    """Whether the weights are saved again at the end, in output_dir itself."""

    @property
    def final_bytes(self) -> int:
        """Bytes of the weights that are saved again at the end."""
        return self.megatron_bytes + self.hf_bytes if self.saves_at_end else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return self.megatron_bytes + self.hf_bytes + self.optimizer_bytes
