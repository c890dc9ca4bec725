"""Constants learnt from a model: what a file of them holds, how it is made, and a stand-in without a model."""
