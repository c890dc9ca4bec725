"""vq-example: a third party's method for vq. The method is vq_example.method, found through the entry point."""
