"""The public calls that use other libraries: `load_pipeline`, handles, jobs, Ray and others.

Each module is public, and is imported when it is first used. What is private lies in the packages
of `shmload`. May import all of them but `_cli` and `_templates`.
"""
