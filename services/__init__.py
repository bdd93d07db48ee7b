"""agent-box: coding agents in persistent microVMs, with every credential held on the host."""

__version__ = "0.1.0"
