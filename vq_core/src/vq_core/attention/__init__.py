"""The core's half of attention: softmax, masks, grouped queries, tiles and the exact tokens."""
