"""One kind of sandbox a file."""
