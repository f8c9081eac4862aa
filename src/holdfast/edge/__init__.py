"""Where rows enter and results leave: sources, feeds, clients, sinks."""
