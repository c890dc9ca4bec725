"""vq-vecinfer."""
