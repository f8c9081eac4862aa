"""A node performs the actions of `core` on a log, an engine and its inputs."""
