"""Training small models with torch alone, on data that the package makes itself."""
