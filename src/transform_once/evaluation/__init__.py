"""Metrics, predictions and rollouts."""
