"""box-guest: what runs inside the microVM. Standard library only."""
