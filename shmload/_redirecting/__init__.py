"""`redirect`: `from_pretrained` of the libraries, led through shared memory.

    from_pretrained ──▶ is all of the call known? ──yes──▶ load_pipeline, load_model
                                    │                             │
                                    no                         it fails
                                    └───────▶ the library ◀───────┘

Guarantee: the result, or the error, is that of the library. Nothing is patched unless it is asked
for, and everything is restored. `patches` imports nothing heavy: a program may ask before
it imports the libraries. May import the core, `_building` and `integrations.loads`.
"""
