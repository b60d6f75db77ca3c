"""Arithmetic on rows: one signature per operation, one torch reference, faster backends beside it."""
