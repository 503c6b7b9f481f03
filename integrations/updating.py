"""`update`: other weights for a pipeline or model that is in use, between two calls of it.

Guarantee: afterwards it computes what a fresh load of the source would, or nothing has changed; but
for an error of a device amid the copies to it, which leaves some weights new. On the host its
tensors are mapped anew, and nothing is copied; on a device they keep their addresses.
"""

import functools
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from shmload._building.call import call_of
from shmload._building.homes import adopt
from shmload._building.mapped import models_in, modules_of, plain_tensors
from shmload._building.publishing import Published, load_published
from shmload._checkpoints.wanted import is_publication
from shmload._compat import ADAPTER_STATE, as_plain_tensors, is_brought_from_copies
from shmload._host.collector import paused_gc
from shmload._placement.inventory import META, OFFLOAD
from shmload._segments.publications import Publication
from shmload.errors import PublicationError
from shmload.integrations.loads import load_model, load_pipeline

_Source = str | os.PathLike[str]
_Simple = bool | int | float | str | None
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# What a configuration says of the file that it was in; dtypes are compared tensor by tensor.
_NO_MEANING = {"architectures", "dtype", "torch_dtype", "transformers_version"}


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    """What `update` has done."""

    source: str
    """The source of the weights that are there now; a publication's with its version."""


def update(thing: Any, source: _Source | Published, **arguments: Any) -> Updated:
    """Give a pipeline or model the weights of a source, in place.

    Call it between two calls of the pipeline. Parameters stay the same objects, and so do modules,
    schedulers, tokenizers and settings. The adapters' scales, and which are active or merged, are
    those of the source. Other processes keep their weights until they ask.

    Args:
        thing: a pipeline or model of this process, on the host or on a device.
        source: a publication, as `shm:NAME` or from `publish`; or what `load_pipeline` or
            `load_model` takes. This is loaded to the host with the arguments of the call that has
            made `thing`; components that were passed to that call as objects are not updated. If
            `thing` comes from elsewhere, it is loaded by its class, with `keep=True`, and with the
            dtype that most bytes of each model have.
        arguments: in place of arguments of that call, such as `subfolder`; none for a publication.
            A component among them then shares its weights with `thing`.

    Returns:
        The source, with its version.

    Raises:
        PublicationError: a class, a shape, a dtype or a model's configuration differs, or an
            offloading call has the weights.
        ArgumentError: a publication takes no arguments.
        Exception: as `load_pipeline` and `load_model`. After any of these, nothing has changed.
        RuntimeError: a device failed amid the copies to it; call `update` again, or load anew.
    """
    given = source.source if isinstance(source, Published) else source
    _refuse_offloaded(thing, str(given))
    with paused_gc():
        text, new = _load(thing, given, arguments)
        with as_plain_tensors():
            # First what can fail.
            modules, tensors = _pair(thing, new, text)
            tensors += [(each, each.clone()) for each in _others_in(thing)]
            ready = [
                (old, _over_memory_of(its, old) if old.is_cpu else its) for old, its in tensors
            ]
            state = [
                (old, name, getattr(its, name))
                for old, its in [(thing, new), *modules]
                for name in ADAPTER_STATE & (vars(old).keys() | vars(its).keys())
                if hasattr(its, name)
            ]
            for old, its in ready:
                with torch.inference_mode(old.is_inference()), torch.no_grad():
                    if old.is_cpu:
                        old.data = its
                    else:  # its address stays: a graph that was captured has it
                        old.data.copy_(its)
            for old, name, value in state:
                setattr(old, name, value)
            for old, its in modules:
                adopt(old, its)
    return Updated(source=text)


def newest(source: str) -> str:
    """Return the source of the newest version of a publication, such as `shm:NAME@3`.

    Args:
        source: as `shm:NAME`.

    Raises:
        SegmentNotFound: there is none.
    """
    return Publication(Publication.parse(source).name).newest().source


def _refuse_offloaded(thing: Any, source: str) -> None:
    for name, model in models_in(thing).items():
        devices = {str(each) for each in getattr(model, "hf_device_map", {}).values()}
        waits_there = bool(devices & {META, OFFLOAD})
        if waits_there or any(map(is_brought_from_copies, modules_of(model))):
            reason = f"an offloading call has the weights of {name or 'the model'}"
            raise _refused(source, reason)


def _load(thing: Any, source: _Source, arguments: dict[str, Any]) -> tuple[str, Any]:
    """Load a source; return it, a publication with its version, and the pipeline or model."""
    if is_publication(source):
        version, own = Publication.parse(str(source)).attach()
        with own:  # while it is attached, it stays
            return version.source, load_published(version.source, arguments)
    call = call_of(models_in(thing).get("", thing))
    if call is None:
        return str(source), _load_like(thing, source, arguments)
    passed = {name: getattr(thing, name) for name in call.passed}
    return str(source), call.again(source, **{**passed, **arguments})


def _load_like(thing: Any, source: _Source, arguments: dict[str, Any]) -> Any:
    """Load a source by the class of a pipeline or model that comes from elsewhere."""
    dtypes = {name: _dtype_of(model) for name, model in models_in(thing).items()}
    if "" in dtypes:
        cls = type(models_in(thing)[""])
        return load_model(cls, source, **{"dtype": dtypes[""], "keep": True, **arguments})
    absent = {name: None for name in thing.config if vars(thing).get(name, thing) is None}
    of_class = {"pipeline_class": type(thing), "dtype": dtypes, "keep": True}
    return load_pipeline(source, **{**of_class, **absent, **arguments})


def _dtype_of(model: torch.nn.Module) -> torch.dtype | None:
    sizes = Counter[torch.dtype]()
    for each in model.parameters():
        sizes[each.dtype] += each.nbytes if each.is_floating_point() else 0
    return max(sizes, key=sizes.__getitem__, default=None)


def _pair(
    thing: Any, new: Any, source: str
) -> tuple[list[tuple[Any, Any]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the modules and the tensors of a pipeline, each with that of the source.

    Raises:
        PublicationError: something else differs.
    """
    here, there = ({each.path: each for each in _lines_of(one)} for one in (thing, new))
    modules: list[tuple[Any, Any]] = []
    tensors: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
    for path in here | there:
        if path not in here or path not in there:
            raise _refused(source, f"{path} is only {'here' if path in here else 'there'}")
        (_, look, old), (_, its_look, its) = here[path], there[path]
        if look != its_look:
            raise _refused(source, f"{path} is {look} here, and {its_look} there")
        if old is its:  # a value, or of a component that was passed
            continue
        if not (isinstance(old, torch.Tensor) and isinstance(its, torch.Tensor)):
            modules.append((old, its))
            continue
        if old.is_meta or its.is_meta:
            where = "here" if old.is_meta else "there"
            raise _refused(source, f"{path} has no bytes {where}")
        # On a device, what shares memory is one: its bytes are copied there.
        place = id(old) if old.is_cpu else (old.data_ptr(), old.nbytes)
        if tensors.setdefault(place, (old, its))[1].data_ptr() != its.data_ptr():
            raise _refused(source, f"{path} is tied to another weight here, and not there")
    return modules, list(tensors.values())


def _others_in(thing: Any) -> Iterator[torch.Tensor]:
    """Yield the host tensors of schedulers, and those of modules that are no weights or buffers.

    They keep their values, and have to be copied: mapped, they keep an old version's memory.
    """
    modules = [each for model in models_in(thing).values() for each in modules_of(model)]
    for part in (*vars(thing).values(), *modules):
        values = vars(part).values() if hasattr(part, "__dict__") else ()
        tensors = (each for each in values if type(each) is torch.Tensor)
        yield from (each for each in tensors if each.is_cpu and each.layout is torch.strided)


def _over_memory_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of another, or of its copy on the host.

    Args:
        tensor: the other.
        like: the result is an inference tensor if this is one, whatever the mode of the caller.
    """
    its = tensor.cpu()
    with torch.inference_mode(like.is_inference()):
        made = torch.empty(0, dtype=its.dtype, device="cpu")
        return made.set_(its.untyped_storage(), its.storage_offset(), its.shape, its.stride())


def _refused(source: str, reason: str) -> PublicationError:
    return PublicationError(f"not updated to {source}: {reason}; load it instead", reason=reason)


# What is compared ---------------------------------------------------------------------------------
# Two models whose lines have the same paths and looks compute the same with the same weights and
# the same state of adapters.


class _Line(NamedTuple):
    """A tensor, a module, or a value of a model's configuration."""

    path: str
    """As `unet.conv_in.weight`, or `unet.config.sample_size`."""
    look: str
    """A module's class; a tensor's dtype and shape, and how it is made of its bytes; a value."""
    part: torch.Tensor | torch.nn.Module | None
    """A tensor with bytes of its own, or a module; None for a value."""


def _lines_of(thing: Any) -> Iterator[_Line]:
    """Yield the weights of a pipeline or model, in an order that depends on its modules alone."""
    configs = set()
    for name, model in sorted(models_in(thing).items()):
        for path, module in model.named_modules(prefix=name):
            yield _Line(path, _name_of(module), module)
            config = getattr(module, "config", None)
            if id(config) not in configs:  # parts of a model have the same one
                configs.add(id(config))
                yield from _lines_of_config(f"{path}.config", config)
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        yield from _lines_of_tensor(f"{path}.{key}", tensor)


def _lines_of_config(path: str, config: Any) -> Iterator[_Line]:
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        if not path.endswith(".config"):
            # A list from a file may be a tuple in a model that a program has made.
            yield _Line(path, json.dumps(values, default=repr), None)
        return
    for name, value in sorted(values.items(), key=str):
        if not str(name).startswith("_") and name not in _NO_MEANING:
            yield from _lines_of_config(f"{path}.{name}", value)


def _lines_of_tensor(path: str, tensor: torch.Tensor) -> Iterator[_Line]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    inner, context = flatten() if flatten else ((), "")
    left_out = {*inner, "persistent"}  # the tensors in it have lines; buffers may have the other
    kind = "" if type(tensor) is torch.nn.Parameter else f"{_name_of(tensor)} "
    if type(tensor) not in _PLAIN or any(name[0] != "_" for name in vars(tensor)):
        kind += "".join(
            # What cannot be compared is never the same.
            f"{name}={value if _is_simple(value) else secrets.token_hex(8)} "
            for name, value in vars(tensor).items()
            if name not in left_out and (type(tensor) not in _PLAIN or name[0] != "_")
        )
    if flatten is None:
        yield _Line(path, f"{kind}{_look_of_bytes(tensor)}", tensor)
        return
    for number, part in enumerate(plain_tensors(tensor)):
        yield _Line(f"{path}.{number}", f"{kind}{context} {_look_of_bytes(part)}", part)


def _is_simple(value: object) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(each, _Simple) for each in values)


def _look_of_bytes(tensor: torch.Tensor) -> str:
    strides = None if tensor.is_contiguous() else tensor.stride()
    return _written(tensor.dtype, tensor.shape, strides)


@functools.cache  # few differ in one model
def _written(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...] | None) -> str:
    return f"{dtype} {tuple(shape)}{'' if strides is None else f' {strides}'}"


def _name_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
