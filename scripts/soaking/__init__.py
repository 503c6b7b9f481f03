"""The modules of `scripts/soak`: changing sources, clients that load, faults, and a judge."""
