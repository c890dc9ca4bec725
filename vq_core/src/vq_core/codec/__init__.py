"""Mathematics that several methods share: bit packing, rotations, codebooks."""
