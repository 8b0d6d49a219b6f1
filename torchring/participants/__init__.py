"""Features that take part in a reduction."""
