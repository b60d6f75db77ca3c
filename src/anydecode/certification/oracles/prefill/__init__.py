"""Oracle tests of the methods that prune or compress the prompt."""
