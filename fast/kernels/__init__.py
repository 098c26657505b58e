"""One module an operation."""
