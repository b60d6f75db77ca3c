"""Oracle tests of the methods that draft with some of the layers."""
