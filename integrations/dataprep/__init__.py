"""Data-prep jobs: one function on many items, in processes that share one copy of the weights.

    from shmload.integrations import dataprep

    def encode(pipe, path):
        pixels = pipe.image_processor.preprocess(Image.open(path)).to(pipe.vae.dtype)
        return {"latents": pipe.vae.encode(pixels).latent_dist.sample()}

    with dataprep.Job("path/to/pipeline", components=["vae"]) as job:
        job.write(encode, paths, "latents")
    latents = dataprep.Results("latents")[0]["latents"]

Guarantee: every item has one result or one error, whichever processes end. A shard is the unit of
work, of writing and of durability: after a kill a folder goes on with its next shard, and ends with
the bytes of an undisturbed run. May import the door `handles`, `errors`, and of the machine what
writes files and names the ends of processes.
"""

from shmload.integrations.dataprep.folder import Report, Results
from shmload.integrations.dataprep.job import Job

__all__ = ["Job", "Report", "Results"]
