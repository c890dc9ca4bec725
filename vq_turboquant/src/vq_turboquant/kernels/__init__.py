"""Kernels of the TurboQuant methods, and their snippets."""
