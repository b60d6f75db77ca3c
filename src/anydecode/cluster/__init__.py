"""Several worker processes, on one machine or many, behind one server."""
