"""vq-qjl."""
