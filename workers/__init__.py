"""The worker program: reads pieces of shards, converts them, writes them into segments.

Runs in processes of its own, without torch; see `shmload.workers.main`.
"""
