"""Fused attention: the core's skeletons, and the snippets by which a method reads its own codes in them."""
