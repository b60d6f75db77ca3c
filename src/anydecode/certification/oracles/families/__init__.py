"""Oracle tests of model families."""
