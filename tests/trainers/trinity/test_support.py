"""Scaling of positions beyond a model's own context."""

from topoplan.specs.known import model
from topoplan.trainers.trinity.document import rope_scaling

QWEN3 = model("Qwen3-8B")


def test_positions_are_scaled_beyond_the_models_own_context() -> None:
    own = QWEN3.max_position_embeddings
    assert own is not None
    assert rope_scaling(QWEN3, own) is None
    scaled = rope_scaling(QWEN3, 2 * own)
    assert (scaled["rope_type"], scaled["factor"], scaled["original_max_position_embeddings"]) == ("yarn", 2.5, 32768)
    assert "ROPE_THETA" in scaled["rope_theta"], "of the model's directory, which this machine may not have"
