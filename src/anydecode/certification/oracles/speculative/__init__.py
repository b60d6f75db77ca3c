"""Oracle tests of the speculative methods."""
