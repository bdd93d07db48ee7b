"""The config file: where it is found, and its refusal of what it does not know."""
