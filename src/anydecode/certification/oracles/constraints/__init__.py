"""Oracle tests of constraints."""
