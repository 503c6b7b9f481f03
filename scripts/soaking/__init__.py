"""What `scripts/soak` is made of: sources that change, clients that load, faults, and a judge."""
