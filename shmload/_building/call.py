"""A call of `load_pipeline` or `load_model`: what it asks for, from the door to what it has made.

Guarantee: what is noted of a call neither keeps a pipeline, a model or a component alive, nor shows
in one.
"""

import os
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import msgspec

from shmload._building.keys import key_of_load, own_quantisers
from shmload._building.maker import Maker
from shmload._building.options import Options, require_no_slip, require_readable
from shmload._building.remembered import once
from shmload._checkpoints.source import Source
from shmload._checkpoints.wanted import Wanted
from shmload._loading.trace import Phase, during

# What another call does not repeat: what a caller watches, and objects that have weights.
_LEFT_OUT = {"collection", "components_manager", "output_loading_info", "state_dict"}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What one call asks for."""

    function: Callable[..., Any]
    """`load_pipeline` or `load_model`."""
    cls: type | str | None
    """The class, or its name; None for the one that the source names."""
    wanted: Wanted
    options: Options
    kwargs: dict[str, Any]
    """For the library."""
    passed: tuple[str, ...] = ()
    """The names of components that the caller has passed in as objects, once they are known."""

    @classmethod
    def parse(
        cls,
        function: Callable[..., Any],
        named: type | str | None,
        source: str | os.PathLike[str],
        dtype: object,
        options: Options,
        kwargs: dict[str, Any],
        *,
        components: Collection[str] | None = None,
        is_pipeline: bool = False,
    ) -> Self:
        """Read the arguments of a public function, as `Wanted.parse` does.

        Args:
            function: the function.
            named: the class, or its name.
            source: as given.
            dtype: as given.
            options: how to load.
            kwargs: the arguments that the function does not name; `torch_dtype` and what only
                shmload reads come out.
            components: as given.
            is_pipeline: the source is a pipeline.

        Raises:
            ArgumentError: a keyword is nearly one of the function's own.
            ArgumentError: an argument is wrong, or does not go with another.
            ArgumentError: a device is not there, as far as `Destination.require_present` tells.
        """
        wanted = Wanted.parse(
            source,
            dtype,
            components,
            kwargs.get("variant"),
            kwargs,
            function=function,
            is_pipeline=is_pipeline,
            has_others=True,
        )
        require_no_slip(kwargs, function)
        require_readable(options, kwargs)
        return cls(function=function, cls=named, wanted=wanted, options=options, kwargs=kwargs)

    def answer(self, maker: Maker, found: Source, dtype: object, kwargs: Mapping[str, Any]) -> Any:
        """Return what an earlier load has built, or what the library builds now.

        Args:
            maker: has found the source.
            found: the source.
            dtype: as the maker settled it.
            kwargs: for the library, as the maker left them.
        """

        def build(models: Mapping[str, Any]) -> Any:
            with during(Phase.IMPORT):  # a load that is recalled needs none of it
                from shmload._building.attempt import load

            given = {**own_quantisers(kwargs), **models}
            # Models that are kept need no bytes of their files.
            needed = tuple(each for each in found.checkpoints if each.component not in models)
            source = msgspec.structs.replace(found, checkpoints=needed)
            return load(source, maker, dtype, self.options, given, title=self.wanted.title)

        with during(Phase.PLAN):
            key = key_of_load(self.cls, found, maker, dtype, self.options, kwargs)
        return once(
            key,
            build,
            keep=bool(self.options.keep),
            meanwhile=lambda: maker.import_classes(found),
            on_recall=self.options.tell_recalled,
        )

    def again(self, source: object, **changes: Any) -> Any:
        """Make the call again, of another source and to the host.

        Args:
            source: the other source.
            changes: in place of arguments of this call.
        """
        options = self.options
        given = {
            "cls" if self.function.__name__ == "load_model" else "pipeline_class": self.cls,
            "dtype": self.wanted.dtype,
            "keep": options.keep,
            "share": options.share,
            "workers": options.workers,
            "verify": options.verify,
            **({} if self.wanted.components is None else {"components": self.wanted.components}),
        }
        return self.function(source=source, **{**given, **self.kwargs, **changes})


_calls: dict[int, Call] = {}
"""By the id of what the call has returned, until that dies."""


def call_of(thing: object) -> Call | None:
    """Return the call that has made a pipeline or model; None if none is known."""
    return _calls.get(id(thing))


def forget(made: object) -> None:
    """Forget the call that has made a pipeline, which has changed since."""
    _calls.pop(id(made), None)


def note(returned: Any, call: Call) -> None:
    """Note which call has made a pipeline or model.

    Args:
        returned: by the call; of a tuple the first.
        call: without its `passed`.
    """
    made = returned[0] if isinstance(returned, tuple) else returned
    # A pipeline's configuration names its components; a model has none.
    parts = (
        vars(made).keys() & getattr(made, "config", ()) if hasattr(type(made), "components") else ()
    )
    passed = tuple(name for name in parts if call.kwargs.get(name) is not None)
    kept = {k: v for k, v in call.kwargs.items() if k not in _LEFT_OUT and k not in passed}
    _calls[id(made)] = msgspec.structs.replace(call, kwargs=kept, passed=passed)
    weakref.finalize(made, _calls.pop, id(made), None).atexit = False
