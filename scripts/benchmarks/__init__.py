"""The modules of `scripts/bench`; not part of the package.

`sources` names the checkpoints; the programs `checkpoints` and `flux_checkpoints` make them.
`probes`, `many_probes`, `service_probes` and `gpu_probes` (with the loaders in `gpu_peers`) run in
fresh processes, which `processes` starts and times. `samples` has the statistics. `measures`,
`many_measures`, `service_measures` and `gpu_measures` have one function per group of rows and
return `figures`; `bench` holds what they share, and `suites` what each suite needs. `report` and
`chart` show the figures, and `machine` describes the machine.
"""
