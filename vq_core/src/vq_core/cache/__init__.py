"""The cache shell: paged store, exact window, frontier, rows of a batch, accounting and policy."""
