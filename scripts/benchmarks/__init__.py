"""The modules of `scripts/bench`; not part of the package.

A suite is a module: `load` (with `keys`), `ready`, `traces`, `many`, `formats` (with `gguf` and
`bucket`), `cold`, `gpu` and `plan`. It has the measurements, and the functions that fresh
processes run for them. `bench` starts these processes and has `checkpoints` make what they load;
`probes` is what they have in common, and `attach` what loads resident weights. `figures` has the
samples and the rows, `report` and `chart` show them, and `machine` describes the machine.
"""
