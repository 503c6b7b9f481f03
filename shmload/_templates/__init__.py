"""`shmload run`: programs that start with their libraries imported.

    caller                      template                    program
      │ ──── connects ───────────▶ │ ──── forks ──────────────▶ │
      │ ◀── Hello ─────────────────┼─────────────────────────── │
      │ ──── Call, descriptors ────┼──────────────────────────▶ │ takes them
      │ ◀── Ready ─────────────────┼─────────────────────────── │
      │ ──── Go ───────────────────┼──────────────────────────▶ │ runs
      │ ◀── Stopped, Ended ─────── │

A template has imported the libraries once, and hides them. It forks when a caller connects; the
copy reads the call and becomes the program, which gets the libraries at its first import of one.
The caller stands for the program: it passes signals on, and ends as the program ends.

Guarantee: a program ends and prints as under `python`, but for what docs/run.md lists. Where that
is in doubt, the caller becomes an ordinary Python. May import `errors`, `_wording`, and of `_host`
what imports next to nothing (`fingerprint`, `private`, `variables`), and in a template and for
lists what reads how much memory there is (`procfs`). It names `integrations` as something to import
in a template, or for `--redirect`.
"""
