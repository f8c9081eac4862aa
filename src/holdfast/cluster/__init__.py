"""Controller, hosts and their supervisor."""
