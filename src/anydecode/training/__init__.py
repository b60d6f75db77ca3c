"""Training of small models with torch alone, on data that the package generates."""
