"""Oracle tests of the serving options."""
