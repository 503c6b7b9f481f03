"""The doors of shmload to other libraries: `load_pipeline`, handles, jobs, ranks, sharding, Ray.

Each module is public, and is imported when it is first used. What is private lies in the rooms of
`shmload`. May import all rooms but `_cli` and `_templates`.
"""
