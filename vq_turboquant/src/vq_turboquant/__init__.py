"""vq-turboquant."""
