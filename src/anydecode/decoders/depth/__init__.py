"""Methods that run some layers first and the rest later, or never."""
