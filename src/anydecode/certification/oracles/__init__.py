"""Oracle tests, one module per family of methods: each compares a method with an independent
implementation of its paper's rule."""
