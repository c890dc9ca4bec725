"""Files as data: strict JSON, safetensors with every claim checked, writing that leaves the old or the new."""
