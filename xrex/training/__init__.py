"""The training pipeline: its state, one step, and the gradients of a loss."""
