"""The variants that come with agent-box: one TOML file each, to be read and copied."""
