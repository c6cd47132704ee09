"""Read a pickle as data: nothing that it names is imported, made or called.

`pickle.load` calls whatever the file names, with the arguments that it gives. Here a name
becomes a `Name` and a call a `Made`, and it is for the reader to see whether they are
what it expects. Memory is bounded by the length of the file: no opcode that reserves
memory by a number in the file is known here.
"""

import pickletools
from typing import Any, NamedTuple, cast

MARK = object()


class Name(NamedTuple):
    """A global that a pickle names."""

    module: str
    name: str


class Made:
    """An object that a pickle asks to be made, with the state that it is to be given."""

    def __init__(self, of: Name, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments, self.state = of, arguments, None

    def __repr__(self) -> str:
        return f"Made({self.of}, {self.arguments}, {self.state})"


class NotPlain(ValueError):  # noqa: N818 - what the file is
    """The file is no pickle, or has something in it that plain data does not need."""


def read_pickle(data: bytes) -> Any:
    """Return what a pickle holds: plain values, and a `Made` for each object.

    Raises NotPlain if it holds anything else.
    """
    try:
        return _run(data)
    except NotPlain:
        raise
    except Exception as error:  # whatever a damaged stack of operands leads to
        raise NotPlain(f"it is no pickle ({type(error).__name__}: {error})") from None


_PUSHES = {
    "SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
}  # fmt: skip
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Any] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, given, position in pickletools.genops(data):
        name, argument = opcode.name, cast(Any, given)
        if name in _PUSHES:
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "MARK":
            stack.append(MARK)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "TUPLE":
            stack.append(tuple(_since_mark(stack)))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else _since_mark(stack)
            exactly(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = _last_two(stack) if name == "SETITEM" else _since_mark(stack)
            pairs = zip(items[::2], items[1::2], strict=True)
            exactly(stack[-1], dict).update((_key(k), v) for k, v in pairs)
        elif name == "STACK_GLOBAL":
            module, named = _last_two(stack)
            stack.append(Name(exactly(module, str), exactly(named, str)))
        elif name in ("NEWOBJ", "REDUCE"):
            of, arguments = _last_two(stack)
            stack.append(Made(exactly(of, Name), exactly(arguments, tuple)))
        elif name == "BUILD":
            state = stack.pop()
            exactly(stack[-1], Made).state = state
        elif name == "STOP":
            if len(stack) != 1:
                raise NotPlain(f"it leaves {len(stack)} values")
            return stack[0]
        elif name not in ("PROTO", "FRAME"):
            raise NotPlain(f"it has the opcode {name} at byte {position}")
    raise NotPlain("it has no end")


def _since_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while stack[at] is not MARK:
        at -= 1
        if at < 0:
            raise NotPlain("it has no mark where one is needed")
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _last_two(stack: list[Any]) -> list[Any]:
    items = stack[-2:]
    del stack[-2:]
    return items


def _key(key: Any) -> Any:
    """Return what may be a key of a dict here: texts, and objects by identity."""
    if not isinstance(key, str | Made):
        raise NotPlain(f"it has a key of {type(key).__name__}")
    return key


def exactly(value: Any, kind: type) -> Any:
    """Return the value, which must be of this very class: a Name is a tuple as well."""
    if type(value) is not kind:
        raise NotPlain(f"it has {type(value).__name__} where {kind.__name__} is needed")
    return value
