"""Rollout routing replay (R3): experts that the rollout engine chose, recorded, carried and replayed in training."""
