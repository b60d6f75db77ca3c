"""Oracle tests of guidance."""
