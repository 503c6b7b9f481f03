"""What `scripts/bench` is made of; not part of the package.

`sources` names what is loaded, and `checkpoints` and `flux_checkpoints` are the programs that make
it. `probes`, `service_probes` and `gpu_probes` (with the loaders in `gpu_peers`) run in fresh
processes; `processes` starts and times those, and `samples` holds the statistics. `measures`,
`service_measures` and `gpu_measures` have one function for each row of their tables, whose entries
are `figures`; `bench` is what they all need, and `suites` what each suite needs. `report` and
`chart` show the figures, and `machine` says where they were measured.
"""
