"""Oracle tests of the decoders under constraints."""
