"""Allocates and starts machines for the engine: fixed operations, standard library only."""
