"""Both sides of the comparison with Structured Streaming, and what they have in common."""
