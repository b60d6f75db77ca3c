"""Methods that run the first layers of the model separately from the rest."""
