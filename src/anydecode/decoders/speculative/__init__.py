"""Speculative decoding methods, one file each, and the code they share."""
