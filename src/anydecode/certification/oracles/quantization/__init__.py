"""Oracle tests of quantization."""
