"""Values for the fields of messages: any, as a strategy of hypothesis, or the simplest one."""

import msgspec
from hypothesis import strategies as st


def any_of(kind):
    """Return a strategy for the values of a type, as `msgspec.inspect.type_info` describes it."""
    match kind:
        case msgspec.inspect.IntType(ge=least, le=most):
            least, most = (-(2**63) if least is None else least), most or 2**64 - 1
            return st.integers(least, most)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.FloatType(ge=least):
            return st.floats(least, allow_nan=False)
        case msgspec.inspect.StrType():
            return st.text(max_size=8)
        case msgspec.inspect.BytesType():
            return st.binary(max_size=8)
        case msgspec.inspect.EnumType(cls):
            return st.sampled_from(cls)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.VarTupleType(item):
            return st.lists(any_of(item), max_size=3).map(tuple)
        case msgspec.inspect.ListType(item):
            return st.lists(any_of(item), max_size=3)
        case msgspec.inspect.DictType(key, value):
            return st.dictionaries(any_of(key), any_of(value), max_size=3)
        case msgspec.inspect.UnionType(kinds):
            return st.one_of(*map(any_of, kinds))
        case msgspec.inspect.StructType(cls, fields):
            return st.builds(cls, **{field.name: any_of(field.type) for field in fields})
    raise AssertionError(kind)


def sample(kind):
    """Return the simplest value of a type that has a value in every field."""
    match kind:
        case msgspec.inspect.VarTupleType(item):
            return (sample(item),)
        case msgspec.inspect.ListType(item):
            return [sample(item)]
        case msgspec.inspect.DictType(key, value):
            return {sample(key): sample(value)}
        case msgspec.inspect.UnionType(kinds):
            return sample(kinds[0])
        case msgspec.inspect.StructType(cls, fields):
            return cls(**{field.name: sample(field.type) for field in fields})
        case msgspec.inspect.EnumType(cls):
            return next(iter(cls))
        case msgspec.inspect.StrType():
            return "ab"
        case msgspec.inspect.BytesType():
            return b"ab"
        case msgspec.inspect.BoolType():
            return True
    return 300
