"""Whether promises are kept: histories, checkers, simulator, chaos, audit."""
