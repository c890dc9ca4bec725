"""Kernels of turboquant_rvq and turboquant_prod, and their snippets."""
