"""The doors of shmload to other libraries: `load_pipeline`, handles, jobs, ranks, sharding, Ray.

A module here is public, and is imported when it is first used. A folder with an underscore is a
room behind the doors. May import all rooms of the core but `_cli`.
"""
