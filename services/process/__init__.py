"""The life of a process of ours, whether or not it is on the bus."""
