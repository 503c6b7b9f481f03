"""The module that a job's fork server imports first: the import prepares the server."""

import os

from shmload.integrations.dataprep.processes import SETUP, prepare_server

if _setup := os.environ.pop(SETUP, None):
    prepare_server(_setup)
