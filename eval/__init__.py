"""Evaluation: speculative decoding of what was exported, its metrics and the leaderboard."""
