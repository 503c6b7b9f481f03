"""`shmload run`: programs that start with their libraries imported.

    caller                      template                    program
      │ ──── connects ───────────▶ │ ──── forks ──────────────▶ │
      │ ◀── hello ─────────────────┼─────────────────────────── │
      │ ──── call, descriptors ────┼──────────────────────────▶ │ takes them
      │ ◀── ready ─────────────────┼─────────────────────────── │
      │ ──── go ───────────────────┼──────────────────────────▶ │ runs
      │ ◀── stopped, ended ─────── │

A template has imported the libraries once, and hides them. It forks when a caller connects; the
copy reads the call and becomes the program, which gets the libraries at its first import of one.
The caller stands for the program: it passes signals on, and ends as the program ends.

Guarantee: a program ends and prints as under `python`, but for what docs/run.md lists. Where that
is in doubt, the caller becomes an ordinary Python. May import `_wording`, of `_host` what imports
next to nothing (`private`, `variables`), and in a template and for lists `fingerprint`, `procfs`
and `shm`. It names `integrations` as something to import in a template, or for `--redirect`.
"""
