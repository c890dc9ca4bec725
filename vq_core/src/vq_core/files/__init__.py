"""Files as data: strict JSON, safetensors read with every claim checked, writing that leaves the old or the new file."""
