"""Backends: the operations of a transformer, in torch (the reference), C and Triton."""
