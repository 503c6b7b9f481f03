"""What `scripts/bench` is made of; not part of the package.

`checkpoints` makes the sources, `probes` runs in fresh processes, `processes` starts and times
those, `samples` holds the statistics, `measures` has one function for each row of the table, whose
entries are `figures`, and `bench` what they all need; `report` and `chart` show the figures, and
`machine` says where they were measured.
"""
