"""`shmload run`: programs that start with their libraries imported.

    caller                      template                    spare ─▶ program
      │ ──── Call: what, how ────▶ │ ──── Call ────────────────▶ │
      │ ◀──────────────────────────┼──────── SendFds, Ready ──── │
      │ ───────────────────────────┼──────── Fds, Go ──────────▶ │ runs
      │ ◀──── Stopped, Ended ───── │

A template has imported the libraries once. It forks a spare ahead, and the next one when a caller
takes that. The caller stands for the program: it passes signals on, and ends as the program ends.
For pipelines that programs load it has branches: copies of it that have loaded them ahead, get the
calls of such programs from it, and then do as it does.

Guarantee: a program sees what it would see under `python`, but for what docs/run.md lists. Where
that is in doubt, the caller becomes an ordinary Python. May import `errors`, `_wording`, and of
`_host` what imports next to nothing (`fingerprint`, `own_folder`, `variables`), and in a template
what reads how much memory there is (`procfs`): it is hidden as all that a template
imports. It names `integrations` as something to import in a template, or for `--redirect`.
"""
