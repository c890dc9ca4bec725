"""The `vq` command: parses, calls, prints."""
