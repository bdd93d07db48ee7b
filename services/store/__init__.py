"""Credentials, encrypted at rest; revealed to the broker only."""
