"""Kernels that several methods share."""
