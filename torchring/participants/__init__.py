"""Features that take part in a round of reduction."""
