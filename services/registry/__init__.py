"""Instance records, the lifecycle state machine, the event journal."""
