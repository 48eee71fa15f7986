"""Training: distillation of a drafter from its target, checkpoints and export."""
