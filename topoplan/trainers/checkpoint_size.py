"""What a run writes to disk: the sizes of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSize:
    """Bytes of one checkpoint, over all its files; without logs and tokenizer, which are small."""

    megatron_bytes: int
    """Weights as Megatron loads them; 0 where they are not saved."""
    hf_bytes: int
    """Weights for Hugging Face; 0 where they are not saved."""
    optimizer_bytes: int
    """The optimizer's state; 0 where it is not saved."""
    at_once: int | None
    """Checkpoints that exist at a time, at most: an old one is removed when a new one is whole. None without a limit, 0
    where only the weights at the end are saved."""

    what: str = "weights"
    """What it has beside the optimizer's state: of adapters not the weights."""

    saves_at_end: bool = True
    """Whether the weights are saved once more at the end, into output_dir itself."""

    @property
    def final_bytes(self) -> int:
        """Weights that are saved once more at the end."""
        return self.megatron_bytes + self.hf_bytes if self.saves_at_end else 0

    @property
    def total_bytes(self) -> int:
        """One checkpoint."""
        return self.megatron_bytes + self.hf_bytes + self.optimizer_bytes
