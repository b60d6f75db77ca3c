"""Oracle tests of the search methods."""
