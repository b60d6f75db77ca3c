"""Oracle tests of the sampling rules."""
