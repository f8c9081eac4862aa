"""A node: performs the core's actions on a log, an engine and its inputs."""
