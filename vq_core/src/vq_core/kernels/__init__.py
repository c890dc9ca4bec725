"""Kernels: one source for Metal, CUDA and a simulator on any CPU."""
