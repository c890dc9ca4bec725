"""QJL's kernels."""

OFFERS = ()
