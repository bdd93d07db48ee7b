"""The command line: what operators, administrators and scripts see."""
