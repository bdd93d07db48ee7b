"""HTTP endpoints for guests: the gate, and the credential behind it."""
