"""Data: prompts, the target's own answers, token rows with a loss mask, and target states."""
