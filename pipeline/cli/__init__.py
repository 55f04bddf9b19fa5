"""The `sluice` command: `main` builds it from entry points and lays out its help, each other module is commands.

Modules import what their commands need inside the functions, so that `--help` is fast.
"""
