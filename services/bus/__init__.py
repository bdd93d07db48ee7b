"""The message bus: envelopes, contracts, authority. Messages and nothing else."""
