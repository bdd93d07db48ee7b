"""Drives VMMs; the only service that may talk to the helper."""
