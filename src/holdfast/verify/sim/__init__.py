"""A cluster in one process: the production code on simulated time, disks and networks."""
