"""Oracle tests of the decoders of diffusion models."""
