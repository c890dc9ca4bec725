"""Measuring what a compressed cache does to a model's predictions."""
