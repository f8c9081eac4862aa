"""The edge of a network, where rows enter and results leave: sources, feeds, clients, sinks."""
