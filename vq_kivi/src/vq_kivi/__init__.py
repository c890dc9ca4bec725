"""vq-kivi: KIVI for vq. The method is vq_kivi.method, found through the entry point."""
