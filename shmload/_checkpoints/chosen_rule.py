"""Which rule a checkpoint gets: the remembered one, that of its class, or the probable one.

The library that owns a class tells its rule, which takes 3 s to import; so it is remembered.
"""

import importlib.util
from collections.abc import Mapping
from functools import cache

from shmload._checkpoints.dtypes import parse_dtype
from shmload._checkpoints.library import library
from shmload._checkpoints.quantised import says_quantised
from shmload._checkpoints.rule import RAW, Rule
from shmload._checkpoints.source import Checkpoint
from shmload._host.memo import Memo

# To be increased whenever `shmload._building.rules` derives other rules than before.
_RULES_VERSION = 1
_LIBRARIES = ("torch", "diffusers", "transformers")


def wanted_dtype(dtype: object, component: str) -> str | None:
    """Return the dtype that diffusers would pass to a component; None leaves it to the library.

    Args:
        dtype: a dtype, its name, None, or a dict of these by component with a `default`.
        component: its name in the pipeline, or empty.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    if isinstance(dtype, Mapping):
        # DiffusionPipeline.from_pretrained: a dict without "default" gives float32.
        dtype = dtype.get(component, dtype.get("default", "float32"))
    return None if dtype is None else parse_dtype(dtype)


def rule_for(checkpoint: Checkpoint, dtype: object) -> Rule:
    """Return the rule of a checkpoint, from memory or from the library that owns its class.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    if known := known_rule(checkpoint, dtype):
        return known
    target = wanted_dtype(dtype, checkpoint.component)
    derived: Rule = library("rules").derive_rule(checkpoint, target)
    _memo(checkpoint, target).write(derived)
    return derived


def likely_rule(checkpoint: Checkpoint, dtype: object) -> Rule:
    """Return the probable rule of a checkpoint, without importing a library.

    It is the remembered rule, or else the one that most classes have. Decoding may begin with it,
    and must begin again if `rule_for` returns another one.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    if known := known_rule(checkpoint, dtype):
        return known
    target = wanted_dtype(dtype, checkpoint.component)
    if target is None and checkpoint.library == "diffusers":
        return Rule(target="F32", is_widening=True)
    return Rule(target=target)


def known_rule(checkpoint: Checkpoint, dtype: object) -> Rule | None:
    """Return the rule of a checkpoint if it is found without importing a library; else None.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    target = wanted_dtype(dtype, checkpoint.component)
    if says_quantised(checkpoint):
        return RAW
    if not checkpoint.class_name:
        return Rule(target=target)
    return _memo(checkpoint, target).read()


def forget_rule(checkpoint: Checkpoint, dtype: object) -> None:
    """Drop a remembered rule that a loaded model contradicts."""
    target = wanted_dtype(dtype, checkpoint.component)
    _memo(checkpoint, target).forget()


def _memo(checkpoint: Checkpoint, target: str | None) -> Memo[Rule]:
    facts = (
        _RULES_VERSION,
        library_versions(),
        checkpoint.library,
        checkpoint.class_name,
        checkpoint.config,
        target,
    )
    return Memo("rules", Rule, facts)


@cache
def library_versions() -> tuple[str, ...]:
    """Return version and place of the libraries that rules and classes come from."""
    from importlib.metadata import version  # 20 ms that many commands spare

    found = []
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        found.append(f"{version(name)} {spec.origin if spec else ''}")
    return tuple(found)
