"""`python -m shmload` is the command line."""

from shmload._cli import main

main(prog_name="shmload")
