"""Decoding methods of diffusion language models, one file each, and the loop they share."""
