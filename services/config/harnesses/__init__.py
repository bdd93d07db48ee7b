"""Presets of harnesses: a TOML file each, and the lock of its packages beside it."""
