"""Guest control, terminals, exec, harness and guest events."""
